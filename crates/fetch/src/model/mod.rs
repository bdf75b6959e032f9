//! Model checking of the pipeline, its buffers and its permits, in thousands of orders of events. It compiles the code
//! of `pipeline/` again over threads and channels that a scheduler runs one at a time
//! ([`shuttle`](https://docs.rs/shuttle)). A test fails if a thread waits forever, if more permits are in use than
//! exist, or if items change their order. A failure prints a schedule that `shuttle::replay` repeats.

#[allow(dead_code, unused_imports, reason = "tests need a part of it")]
#[path = "../pipeline/mod.rs"]
mod pipeline;
mod sync;

use pipeline::{Permit, Permits, Pipeline, Recycler, StagePanicked};
use shuttle::scheduler::RandomScheduler;
use shuttle::{Config, MaxSteps, Runner};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Orders of events that each test tries.
const SCHEDULES: usize = 1500;
/// Many times what a pipeline of a few items takes. A thread that needs more waits forever.
const MOST_STEPS: usize = 20_000;

impl From<StagePanicked> for String {
    fn from(panicked: StagePanicked) -> String {
        panicked.message
    }
}

fn try_all(scenario: impl Fn() + Send + Sync + 'static) {
    let mut config = Config::new();
    config.max_steps = MaxSteps::FailAfter(MOST_STEPS);
    Runner::new(RandomScheduler::new_from_seed(1, SCHEDULES), config).run(scenario);
}

/// Counts the live items, to detect too many.
#[derive(Clone, Default)]
struct Alive(Arc<AtomicUsize>);

/// An item with its permit.
struct Item {
    number: u64,
    alive: Alive,
    _permit: Permit,
}

impl Item {
    fn new(number: u64, permit: Permit, alive: &Alive, most: usize) -> Item {
        let before = alive.0.fetch_add(1, Ordering::SeqCst);
        assert!(before < most, "{} permits are out, {most} were made", before + 1);
        Item { number, alive: alive.clone(), _permit: permit }
    }
}

impl Drop for Item {
    fn drop(&mut self) {
        // Decremented before the permit is dropped.
        self.alive.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The failure of the second stage, and the item at which it occurs.
#[derive(Clone, Copy)]
enum Trouble {
    None,
    Error(u64),
    Panic(u64),
}

/// A stage that makes `count` items as permits allow, and a stage that passes them on.
fn two_stages(count: u64, permits: usize, queue: usize, trouble: Trouble) -> Pipeline<Item, String> {
    let (free, alive, mut next) = (Permits::new(permits), Alive::default(), 0);
    let made = Pipeline::start("make", queue, move |stage| {
        if next == count {
            return Ok(None);
        }
        let Some(permit) = stage.permit(&free) else { return Ok(None) };
        next += 1;
        Ok(Some(Item::new(next - 1, permit, &alive, permits)))
    });
    made.then("pass", queue, move |_, item: Item| match trouble {
        Trouble::Error(at) if at == item.number => Err("trouble".to_string()),
        Trouble::Panic(at) if at == item.number => panic!("trouble"),
        _ => Ok(Some(item)),
    })
}

/// Receives everything and keeps the last `held` items at a time. Returns the number of items and the error after them.
fn receive_all(line: &mut Pipeline<Item, String>, held: usize) -> (u64, Option<String>) {
    let (mut kept, mut count) = (std::collections::VecDeque::new(), 0);
    while let Some(item) = line.receive() {
        match item {
            Ok(item) => {
                assert_eq!(item.number, count, "items come in order");
                count += 1;
                kept.push_back(item);
                kept.drain(..kept.len().saturating_sub(held));
            }
            Err(error) => {
                assert!(line.receive().is_none(), "nothing follows an error");
                return (count, Some(error));
            }
        }
    }
    (count, None)
}

#[test]
fn items_come_in_order_and_no_more_than_permits_allow() {
    for (permits, queue, held) in [(1, 0, 0), (2, 1, 1), (3, 2, 2)] {
        try_all(move || {
            let mut line = two_stages(4, permits, queue, Trouble::None);
            assert_eq!(receive_all(&mut line, held), (4, None));
        });
    }
}

#[test]
fn a_stage_that_waits_for_a_permit_ends_with_its_consumer() {
    for received in 0..3 {
        try_all(move || {
            // The consumer keeps what it received, so no permit returns until the pipeline is dropped.
            let mut line = two_stages(u64::MAX, 2, 1, Trouble::None);
            let kept: Vec<_> = (0..received).map(|_| line.receive()).collect();
            drop(line);
            drop(kept);
        });
    }
}

#[test]
fn an_error_ends_stages_that_wait_for_permits() {
    try_all(|| {
        let mut line = two_stages(u64::MAX, 3, 1, Trouble::Error(2));
        assert_eq!(receive_all(&mut line, 2), (2, Some("trouble".into())));
    });
}

#[test]
fn a_panic_ends_stages_that_wait_for_permits() {
    try_all(|| {
        let mut line = two_stages(u64::MAX, 3, 1, Trouble::Panic(2));
        assert_eq!(receive_all(&mut line, 2), (2, Some("trouble".into())));
    });
}

#[test]
fn buffers_go_round_and_nobody_waits_for_one_when_all_ends() {
    try_all(|| {
        let (buffers, mut next) = (Recycler::<Vec<u64>>::new(2), 0);
        let mut line = Pipeline::<_, String>::start("fill", 1, move |stage| {
            let Some(mut buffer) = stage.take(&buffers) else { return Ok(None) };
            buffer.clear();
            buffer.push(next);
            next += 1;
            Ok(Some(buffer))
        });
        for expected in 0..3 {
            assert_eq!(**line.receive().unwrap().unwrap(), vec![expected][..]);
        }
        let kept = (line.receive(), line.receive());
        drop(line);
        drop(kept);
    });
}

/// Workers that take turns. Each takes a permit before its item's turn, as those of `diskgnn` do on a GPU. The consumer
/// keeps `held` items when it asks for more.
fn workers(count: usize, permits: usize, held: usize) {
    let (free, alive) = (Permits::new(permits), Alive::default());
    let worker = |first: usize| {
        let (free, alive) = (free.clone(), alive.clone());
        let mut numbers = (first as u64..6).step_by(count);
        Pipeline::start("list", 0, move |_| Ok(numbers.next())).then("read", 0, move |stage, number| {
            Ok(stage.permit(&free).map(|permit| Item::new(number, permit, &alive, permits)))
        })
    };
    let line = Pipeline::in_turn((0..count).map(worker).collect());
    let mut line = line.then("assemble", 0, |_, item| Ok(Some(item)));
    assert_eq!(receive_all(&mut line, held), (6, None));
}

#[test]
fn workers_in_turn_need_a_permit_each_beside_those_of_the_consumer() {
    try_all(|| workers(2, 3, 1));
    // With one permit fewer, the worker whose turn it is may wait for the other's permit. The model detects that.
    let found = catch_unwind(AssertUnwindSafe(|| try_all(|| workers(2, 2, 1))));
    assert!(found.is_err(), "two permits are not enough for two workers and one batch in use");
}

/// A stage that takes the items of another pipeline. That one waits until what it passed on before is dropped, wherever it
/// is. The consumer drops all after `received` items.
fn nested(received: usize, with_stage: bool) {
    let (mut number, mut before) = (0u64, None::<sync::Receiver<()>>);
    let mut inner = Pipeline::<(u64, sync::Sender<()>), String>::start("read", 0, move |stage| {
        if let Some(before) = before.take() {
            stage.wait_for_drop(&before);
        }
        let (held, released) = sync::bounded(0);
        (number, before) = (number + 1, Some(released));
        Ok(Some((number, held)))
    });
    let next = move |stage: &pipeline::Stage| match with_stage {
        true => inner.receive_for(stage).transpose(),
        false => inner.receive().transpose(),
    };
    let line = Pipeline::start("sample", 1, next);
    let mut line = line.then("gather", 0, |_, (number, _held)| Ok(Some(number)));
    for expected in 1..=received as u64 {
        assert_eq!(line.receive(), Some(Ok(expected)));
    }
}

#[test]
fn a_pipeline_inside_a_stage_ends_with_it() {
    (0..3).for_each(|received| try_all(move || nested(received, true)));
    // Without the stage, a queue keeps what the inner pipeline waits for. The model detects that.
    assert!(catch_unwind(AssertUnwindSafe(|| try_all(|| nested(1, false)))).is_err());
}
