//! Tests of the pipeline on real threads. They are not in `pipeline/mod.rs`, because the model compiles that file
//! again.

use crate::pipeline::*;
use std::time::{Duration, Instant};

impl From<StagePanicked> for String {
    fn from(panicked: StagePanicked) -> String {
        panicked.to_string()
    }
}

fn numbers(range: impl Iterator<Item = u64> + Send + 'static) -> Pipeline<u64, String> {
    let mut range = range;
    Pipeline::start("make", 2, move |_| Ok(range.next()))
}

fn pause() {
    std::thread::sleep(Duration::from_millis(1));
}

#[test]
fn items_come_out_in_order_and_times_add_up() {
    let started = Instant::now();
    let mut line = numbers(0..50).then("double", 2, |stage, number| {
        stage.clock().starved(pause);
        pause();
        Ok(Some(number * 2))
    });
    let mut found = Vec::new();
    while let Some(item) = line.receive() {
        found.push(item.unwrap());
    }
    assert!(found.into_iter().eq((0..50).map(|number| number * 2)));
    let (times, wall) = (line.times(), started.elapsed().as_secs_f64());
    assert_eq!((times[0].items, times[1].items), (51, 50));
    assert!(times[1].busy >= 0.05 && times[1].starved >= 0.05, "{times:?}");
    assert!(times[0].blocked > times[0].busy, "{times:?}");
    assert!(times.iter().all(|stage| stage.busy + stage.starved + stage.blocked <= wall), "{times:?}");
}

#[test]
fn pipelines_in_turn_keep_the_order_and_their_errors_and_panics() {
    let part = |first: u64, last: u64| {
        let mut numbers = (first..last).step_by(3);
        Pipeline::start("part", 1, move |_| match numbers.next() {
            Some(91) => Err("ninety-one".to_string()),
            number => Ok(number),
        })
    };
    let mut line = Pipeline::in_turn((0..3).map(|first| part(first, 50)).collect());
    for expected in 0..50 {
        assert_eq!(line.receive(), Some(Ok(expected)));
    }
    assert_eq!(line.receive(), None);
    assert_eq!((line.times().len(), line.times()[0].items), (1, 53));
    let mut line = Pipeline::in_turn((0..3).map(|first| part(first, u64::MAX)).collect());
    for expected in 0..91 {
        assert_eq!(line.receive(), Some(Ok(expected)));
    }
    assert_eq!(line.receive(), Some(Err("ninety-one".to_string())));
    let broken = Pipeline::<u64, String>::start("broken", 1, |_| panic!("broken"));
    let mut line = Pipeline::in_turn(vec![part(0, 10), broken]);
    assert_eq!(line.receive(), Some(Ok(0)));
    assert!(line.receive().unwrap().unwrap_err().contains("`broken` ended unexpectedly (broken)"));
    assert_eq!(line.receive(), None);
    drop(Pipeline::in_turn((0..3).map(|first| part(first, u64::MAX)).collect()));
}

#[test]
fn an_error_comes_out_last_and_stops_the_stages() {
    let mut line = numbers(0..).then("check", 1, |_, number| match number {
        5 => Err("five".to_string()),
        number => Ok(Some(number)),
    });
    for expected in 0..5 {
        assert_eq!(line.receive(), Some(Ok(expected)));
    }
    assert_eq!(line.receive(), Some(Err("five".to_string())));
    assert_eq!(line.receive(), None);
}

#[test]
fn a_consumer_that_goes_away_stops_endless_stages() {
    let mut line = numbers(0..).then("pass", 1, |_, number| Ok(Some(number)));
    assert_eq!(line.receive(), Some(Ok(0)));
    drop(line);
}

#[test]
fn a_stage_that_panics_is_an_error_and_not_an_end() {
    let mut line = numbers(0..).then("break", 1, |_, number| {
        assert!(number < 3, "three");
        Ok(Some(number))
    });
    for expected in 0..3 {
        assert_eq!(line.receive(), Some(Ok(expected)));
    }
    let said = line.receive().unwrap().unwrap_err();
    assert!(said.contains("`break`") && said.contains("three"), "{said}");
    assert_eq!(line.receive(), None);
}

/// Whatever a stage has when it panics is returned, and a stage that waits for it ends.
#[test]
fn nobody_waits_for_what_a_stage_held_when_it_panicked() {
    let (buffers, permits) = (Recycler::<Vec<u8>>::new(1), Permits::new(1));
    let mine = permits.clone();
    let mut made = 0;
    let mut line = Pipeline::<_, String>::start("take", 0, move |stage| {
        let (Some(buffer), Some(permit)) = (stage.take(&buffers), stage.permit(&mine)) else {
            return Ok(None);
        };
        made += 1;
        Ok(Some((made, buffer, permit)))
    })
    .then("break", 0, |_, (made, buffer, permit)| {
        assert!(made < 4, "four");
        Ok(Some((made, buffer, permit)))
    });
    for expected in 1..4 {
        let (made, buffer, permit) = line.receive().unwrap().unwrap();
        assert_eq!(made, expected);
        drop((buffer, permit));
    }
    assert!(line.receive().unwrap().unwrap_err().contains("four"));
    assert!(line.receive().is_none());
}

#[test]
fn a_stage_that_waits_ends_with_its_consumer() {
    let permits = Permits::new(2);
    let mut line = Pipeline::<_, String>::start("take", 2, move |stage| Ok(stage.permit(&permits)));
    let (first, second) = (line.receive().unwrap().unwrap(), line.receive().unwrap().unwrap());
    drop(first);
    let third = line.receive().unwrap().unwrap();
    // Two are in use, so the stage waits.
    drop(line);
    drop((second, third));
}
