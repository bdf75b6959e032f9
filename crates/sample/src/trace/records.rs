//! Encodes and decodes records in either format.

use super::TraceHeader;
use super::columns::{ColumnsDecoder, ColumnsEncoder};
use super::gaps::{GapsDecoder, GapsEncoder};
use super::parts::Flaw;
use crate::{Form, Result, Sample, SampleError};
use std::path::Path;

/// The format of records. All records of a file have the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum RecordFormat {
    /// Format 2, node by node: smaller by a tenth, slow to decode. Written only after other records of this format.
    Gaps,
    /// Format 3, array by array: decoded by loops without branches.
    #[default]
    Columns,
}

impl RecordFormat {
    /// Its number in files.
    pub fn number(self) -> u32 {
        match self {
            RecordFormat::Gaps => 2,
            RecordFormat::Columns => 3,
        }
    }

    /// The format of this number, if it is known.
    pub fn of_number(number: u32) -> Option<RecordFormat> {
        [RecordFormat::Gaps, RecordFormat::Columns].into_iter().find(|format| format.number() == number)
    }
}

/// Encodes and decodes single records; buffers are reused.
#[derive(Default)]
pub struct SampleRecords {
    format: RecordFormat,
    gaps: (GapsEncoder, GapsDecoder),
    columns: (ColumnsEncoder, ColumnsDecoder),
}

impl SampleRecords {
    /// Records of a format.
    pub fn new(format: RecordFormat) -> SampleRecords {
        SampleRecords { format, ..SampleRecords::default() }
    }

    /// The format.
    pub fn format(&self) -> RecordFormat {
        self.format
    }

    /// The record of a sample made with the header's settings. `home` is for error messages.
    pub fn encode(&mut self, header: &TraceHeader, sample: &Sample, home: &Path) -> Result<&[u8]> {
        check(header, sample, home)?;
        if self.format == RecordFormat::Gaps && sample.has_pulled() {
            let what = "pulled nodes, and its records are of format 2, which is older than those";
            return Err(SampleError::ForeignSample { path: home.to_path_buf(), what });
        }
        Ok(match self.format {
            RecordFormat::Gaps => self.gaps.0.encode(header, sample),
            RecordFormat::Columns => self.columns.0.encode(header, sample),
        })
    }

    /// The sample of a record. `home` is for error messages.
    pub fn decode(
        &mut self,
        header: &TraceHeader,
        record: &[u8],
        home: &Path,
        out: &mut Sample,
    ) -> Result<()> {
        let decoded = self.take(header, record, out);
        decoded.map_err(|found| SampleError::trace(home, "a sample", found))
    }

    pub(super) fn take(&mut self, header: &TraceHeader, record: &[u8], out: &mut Sample) -> Result<(), Flaw> {
        match self.format {
            RecordFormat::Gaps => self.gaps.1.decode(header, record, out),
            RecordFormat::Columns => self.columns.1.decode(header, record, out),
        }
    }
}

/// A record does not repeat the header, so a sample made with other settings could not be read back.
fn check(header: &TraceHeader, sample: &Sample, path: &Path) -> Result<()> {
    let TraceHeader { settings, nodes, edges, relations, .. } = header;
    let carry = settings.carry;
    let refuse = |what: &'static str| Err(SampleError::ForeignSample { path: path.to_path_buf(), what });
    if sample.form != settings.form || sample.layers() != settings.fanouts.len() {
        return refuse("another form or depth");
    }
    let all_degrees = carry.degrees || sample.form == Form::Shadow;
    let listed = if all_degrees { 0 } else { sample.node_id_offsets[1] as usize };
    if sample.degrees.len() != sample.node_ids.len() - listed {
        return refuse("other degrees carried");
    }
    for block in &sample.blocks {
        let count = |carried: bool| if carried { block.nbrs.len() } else { 0 };
        if block.positions.len() != count(carry.positions)
            || block.edges.len() != count(carry.edges)
            || block.relations.len() != count(carry.relations)
        {
            return refuse("other positions, edges or kinds carried");
        }
        if block.edges.iter().any(|edge| edge.0 >= *edges) {
            return refuse("edges of another graph");
        }
        if block.relations.iter().any(|kind| *kind as u64 >= *relations) {
            return refuse("kinds of edges of another graph");
        }
    }
    if sample.node_ids.iter().any(|node| node.0 >= *nodes) {
        return refuse("nodes of another graph");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Carry, Fanout, InMemory, Position, Sampler, Settings};
    use esker_types::NodeId;
    use proptest::prelude::*;

    const FORMATS: [RecordFormat; 2] = [RecordFormat::Gaps, RecordFormat::Columns];

    fn header(settings: Settings) -> TraceHeader {
        let (dataset, batches, direction) = (String::new(), String::new(), crate::Direction::Incoming);
        TraceHeader { dataset, nodes: 200, edges: 9000, relations: 0, direction, batches, settings }
    }

    /// A sample of a graph with all degrees from 0 to 89, with pulled nodes if it can have any.
    fn sampled(form: usize, carry: Carry, fanouts: Vec<Fanout>, pulled: bool) -> (TraceHeader, Sample) {
        let form = [Form::Dense, Form::Layered, Form::Shadow][form];
        let lists: Vec<Vec<u64>> =
            (0..200u64).map(|node| (0..node % 90).map(|at| at * 2).collect()).collect();
        let settings = Settings { seed: 1, fanouts, form, carry };
        let graph = InMemory::<u32>::from_adjacency(&lists, None);
        let (mut sample, seeds) = (Sample::default(), [150, 80, 80].map(NodeId));
        let mut sampler = Sampler::new(&graph, settings.clone(), 1 << 30).unwrap();
        let at = Position { epoch: 0, batch: 0 };
        match pulled && settings.check_pulls().is_ok() {
            true => {
                let pulls = &mut |hop: usize, _: usize, node: NodeId| node.0 % 3 != hop as u64 % 2;
                sampler.sample_with_pulls(at, &seeds, pulls, &mut sample).unwrap();
            }
            false => sampler.sample(at, &seeds, &mut sample).unwrap(),
        }
        (header(settings), sample)
    }

    fn fanouts() -> impl Strategy<Value = Vec<Fanout>> {
        prop::collection::vec(prop_oneof![(1u32..7).prop_map(Fanout::AtMost), Just(Fanout::All)], 0..4)
    }

    proptest! {
        /// Each format is the slow twin of the other.
        #[test]
        fn both_formats_give_back_the_sample(
            form in 0usize..3, fanouts in fanouts(), pulled: bool, positions: bool, edges: bool, degrees: bool,
            others in prop::collection::vec((0usize..3, fanouts()), 0..3),
        ) {
            let carry = Carry { positions, edges, degrees, ..Carry::default() };
            let (header, sample) = sampled(form, carry, fanouts, pulled);
            for format in FORMATS {
                let (mut records, mut out) = (SampleRecords::new(format), Sample::default());
                // What buffers had before must not show.
                for (form, fanouts) in &others {
                    let (header, other) = sampled(*form, carry, fanouts.clone(), !pulled);
                    if format == RecordFormat::Gaps && other.has_pulled() {
                        continue;
                    }
                    let record = records.encode(&header, &other, Path::new("")).unwrap().to_vec();
                    records.take(&header, &record, &mut out).unwrap();
                    prop_assert_eq!(&out, &other);
                }
                let record = records.encode(&header, &sample, Path::new("")).map(<[u8]>::to_vec);
                // Format 2 is older than pulled nodes.
                prop_assert_eq!(record.is_err(), format == RecordFormat::Gaps && sample.has_pulled());
                let Ok(record) = record else { continue };
                records.take(&header, &record, &mut out).unwrap();
                prop_assert_eq!(&out, &sample);
                prop_assert_eq!(out.digest(), sample.digest());
            }
        }

        /// Checksums detect accidents; this test is about forged records.
        #[test]
        fn forged_records_are_described_and_never_panic(
            form in 0usize..3, columns: bool, positions: bool, pulled: bool, layers in 1usize..4,
            flips in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
            cut in prop::option::of(any::<prop::sample::Index>()),
        ) {
            let carry = Carry { positions, ..Carry::default() };
            let (header, sample) = sampled(form, carry, vec![Fanout::AtMost(4); layers], pulled && columns);
            let mut records = SampleRecords::new(FORMATS[columns as usize]);
            let mut record = records.encode(&header, &sample, Path::new("")).unwrap().to_vec();
            let length = record.len();
            flips.iter().for_each(|(at, bits)| record[at.index(length)] ^= bits);
            record.truncate(cut.map_or(length, |cut| cut.index(length)));
            let mut out = Sample::default();
            if records.take(&header, &record, &mut out).is_ok() {
                let distinct: std::collections::HashSet<_> = out.node_ids.iter().collect();
                prop_assert_eq!(distinct.len(), out.node_ids.len());
                prop_assert!(out.node_ids.iter().all(|node| node.0 < header.nodes));
                // Every layer finds its neighbours among its inputs.
                for layer in 0..out.layers() {
                    let view = out.layer(layer);
                    let used = &view.nbrs[view.nbr_offsets[0] as usize..*view.nbr_offsets.last().unwrap() as usize];
                    prop_assert!(used.iter().all(|nbr| view.inputs.contains(&nbr.0)));
                    prop_assert!(view.nbr_offsets.is_sorted());
                }
            }
        }
    }

    #[test]
    fn formats_are_known_by_their_numbers() {
        for format in FORMATS {
            assert_eq!(RecordFormat::of_number(format.number()), Some(format));
        }
        assert_eq!((RecordFormat::of_number(1), RecordFormat::of_number(4)), (None, None));
    }
}
