//! Flags that would change nothing are refused, with what would make them count. Only what is given now is looked at: a run
//! directory may hold anything that an earlier Esker took.

use super::Flags;
use crate::exit::usage;
use esker_nn::{DecoderKind, Kind, LinkLoss, OptimizerKind};
use esker_strategies::StrategyKind;
use esker_train::link::{LinkConfig, NegativeCount};
use esker_train::{EvaluationMode, OrderName, RunConfig};
use esker_types::DeviceName;

/// A flag that counts in some runs only.
struct FlagUse {
    flag: &'static str,
    is_given: bool,
    counts: bool,
    /// What makes it count.
    counts_with: &'static str,
}

fn flag(flag: &'static str, is_given: bool, counts: bool, counts_with: &'static str) -> FlagUse {
    FlagUse { flag, is_given, counts, counts_with }
}

/// Refuses the first flag of some that is given and changes nothing with `choice`.
fn check(choice: &str, flags: &[FlagUse]) -> anyhow::Result<()> {
    match flags.iter().find(|flag| flag.is_given && !flag.counts) {
        None => Ok(()),
        Some(FlagUse { flag, counts_with, .. }) => {
            Err(usage(format!("{flag} has no effect with {choice}; leave it out, or use {counts_with}")))
        }
    }
}

/// A choice as it is written on the command line.
fn word_of(choice: impl std::fmt::Debug) -> String {
    format!("{choice:?}").to_lowercase()
}

/// Refuses a limit of a GPU's memory where none is used.
pub fn check_gpu_memory(is_given: bool, device: DeviceName) -> anyhow::Result<()> {
    let counts = device != DeviceName::Cpu;
    check(&format!("--device {device}"), &[flag("--gpu-memory", is_given, counts, "--device cuda")])
}

impl Flags {
    /// Refuses what was given and changes nothing in the run that came of it.
    pub fn check_effect(&self, config: &RunConfig) -> anyhow::Result<()> {
        check(&format!("--strategy {}", config.strategy), &self.of_strategies(config.strategy))?;
        check(&format!("--model {}", word_of(config.model.kind)), &self.of_models(config.model.kind))?;
        check(
            &format!("--optimizer {}", word_of(config.optimizer.kind)),
            &self.of_optimizers(config.optimizer.kind),
        )?;
        check_gpu_memory(self.gpu_memory.is_some(), config.device)?;
        let (counted, with) = (config.partition_counts.is_some(), "--partitions and an order over them");
        let parts = [("--resident", self.resident), ("--logical", self.logical)];
        check("no --partitions", &parts.map(|(name, given)| flag(name, given.is_some(), counted, with)))?;
        check("--task node", &self.of_links(config.link.is_some()))?;
        let history = config.history.is_some();
        let with = "--history-rows, --history-set or --strategy outre";
        check(
            "no history",
            &[
                flag("--staleness", self.staleness.is_some(), history, with),
                flag("--history-hop", self.history_hop.is_some(), history, with),
                flag("--history-dtype", self.history_dtype.is_some(), history, with),
            ],
        )?;
        self.check_order(config)?;
        let evaluates = config.eval != EvaluationMode::None;
        let samples = [config.eval, config.final_eval].contains(&EvaluationMode::Sampled);
        check(
            "--eval none",
            &[
                flag("--eval-every", self.eval_every.is_some(), evaluates, "--eval sampled or full"),
                flag("--patience", self.patience.is_some(), evaluates, "--eval sampled or full"),
                flag("--metric", self.metric.is_some(), evaluates, "--eval sampled or full"),
                flag(
                    "--schedule plateau",
                    self.schedule.as_deref().is_some_and(|schedule| schedule.starts_with("plateau")),
                    evaluates,
                    "--eval sampled or full",
                ),
            ],
        )?;
        self.check_links(config)?;
        check(
            "an evaluation that samples nothing",
            &[flag("--eval-fanout", self.eval_fanout.is_some(), samples, "--eval sampled")],
        )
    }

    /// Refuses flags of other orders than that of the run.
    fn check_order(&self, config: &RunConfig) -> anyhow::Result<()> {
        let groups = config.order == OrderName::Groups;
        let order = match config.order.over_partitions() {
            Some(kind) => format!("--order {kind}"),
            None => format!("--order {}", word_of(config.order)),
        };
        check(
            &order,
            &[
                flag("--group", self.group.is_some(), groups, "--order groups"),
                flag("--partitioning", self.partitioning.is_some(), groups, "--order groups"),
                flag("--neighbour-policy", self.neighbour_policy.is_some(), groups, "--order groups"),
            ],
        )?;
        let over = config.order.over_partitions().is_some();
        let with = "--order two-level-beta, tour, beta, dispersed or training-first";
        check(
            &order,
            &[
                flag("--partitions", self.partitions.is_some(), over, with),
                flag("--resident", self.resident.is_some(), over, with),
                flag("--logical", self.logical.is_some(), over, with),
                flag("--resident-only", self.resident_only.is_some(), over, with),
            ],
        )
    }

    /// Refuses flags of links and of embeddings that the choices of others leave without effect.
    fn check_links(&self, config: &RunConfig) -> anyhow::Result<()> {
        let turns = |link: &LinkConfig| matches!(link.decoder, DecoderKind::RotatE { .. });
        let begins = config.embeddings.is_some() || config.link.as_ref().is_some_and(turns);
        check(
            "no embeddings",
            &[flag("--init", self.init.is_some(), begins, "--embeddings D or --decoder rotate")],
        )?;
        let Some(link) = &config.link else { return Ok(()) };
        let shared = link.negatives != NegativeCount::All;
        check(
            "--negatives all",
            &[
                flag("--chunks", self.chunks.is_some(), shared, "a number of --negatives"),
                flag("--degree-share", self.degree_share.is_some(), shared, "a number of --negatives"),
            ],
        )?;
        let (loss, has_margin, has_temperature) = match link.loss {
            LinkLoss::Softmax => ("softmax", false, false),
            LinkLoss::Logistic => ("logistic", false, false),
            LinkLoss::Margin { .. } => ("margin", true, false),
            LinkLoss::SelfAdversarial { .. } => ("self-adversarial", true, true),
        };
        // The initial rows of RotatE depend on the margin.
        let has_margin = has_margin || (turns(link) && self.init.is_none());
        let with_margin = "--loss margin or --loss self-adversarial";
        check(
            &format!("--loss {loss}"),
            &[
                flag("--margin", self.margin.is_some(), has_margin, with_margin),
                flag("--temperature", self.temperature.is_some(), has_temperature, "--loss self-adversarial"),
            ],
        )?;
        let measures = matches!(link.decoder, DecoderKind::TransE { .. });
        let relates = link.decoder != DecoderKind::Dot;
        let other = "a --decoder with relations";
        check(
            &format!("--decoder {}", link.decoder.name()),
            &[
                flag("--distance", self.distance.is_some(), measures, "--decoder transe"),
                flag("phase-scale", self.phase_scale.is_some(), turns(link), "--decoder rotate"),
                flag("--relation-dropout", self.relation_dropout.is_some(), relates, other),
                flag("--inverse-relations", self.inverse_relations == Some(true), relates, other),
                flag("--init-relations", self.init_relations.is_some(), relates, other),
            ],
        )?;
        let samples = !config.fanout.is_empty();
        check(
            "an encoder without neighbours",
            &[flag("--target-edges", self.target_edges.is_some(), samples, "an --encoder that has them")],
        )
    }

    fn of_links(&self, links: bool) -> Vec<FlagUse> {
        let given = [
            ("--decoder", self.decoder.is_some()),
            ("--out-channels", self.out_channels.is_some()),
            ("--distance", self.distance.is_some()),
            ("phase-scale", self.phase_scale.is_some()),
            ("--loss", self.loss.is_some()),
            ("--margin", self.margin.is_some()),
            ("--temperature", self.temperature.is_some()),
            ("--reduction", self.reduction.is_some()),
            ("--negatives", self.negatives.is_some()),
            ("--source-negatives", self.source_negatives.is_some()),
            ("--degree-share", self.degree_share.is_some()),
            ("--chunks", self.chunks.is_some()),
            ("--mask", self.mask.is_some()),
            ("--edge-weights", self.edge_weights.is_some()),
            ("--init-relations", self.init_relations.is_some()),
            ("--inverse-relations", self.inverse_relations == Some(true)),
            ("--target-edges", self.target_edges.is_some()),
            ("--relation-dropout", self.relation_dropout.is_some()),
            ("--l2", self.l2.is_some()),
            ("--n3", self.n3.is_some()),
            ("--ties", self.ties.is_some()),
            ("--raw", self.raw == Some(true)),
            ("--candidates", self.candidates.is_some()),
            ("--candidate-block", self.candidate_block.is_some()),
        ];
        given.into_iter().map(|(name, given)| flag(name, given, links, "--task link")).collect()
    }

    fn of_strategies(&self, strategy: StrategyKind) -> Vec<FlagUse> {
        let ginex = matches!(strategy, StrategyKind::Ginex | StrategyKind::Outre);
        let (diskgnn, marius) = (strategy == StrategyKind::DiskGnn, strategy == StrategyKind::Marius);
        let packs = diskgnn || strategy == StrategyKind::Esker;
        let reads = "--strategy ginex, outre, diskgnn, esker or marius";
        let (one, other, both) = (
            "--strategy ginex or --strategy outre",
            "--strategy diskgnn or --strategy esker",
            "--strategy ginex, outre, diskgnn or esker",
        );
        vec![
            flag("--disk-budget", self.disk_budget.is_some(), ginex || packs, both),
            flag("--feature-cache", self.feature_cache.is_some(), ginex || packs, both),
            flag("--neighbour-cache", self.neighbour_cache.is_some(), ginex || packs, both),
            flag("--io-block", self.io_block.is_some(), ginex || packs || marius, reads),
            flag("--superbatch", self.superbatch.is_some(), ginex, one),
            flag("--neighbour-policy", self.neighbour_policy.is_some(), ginex, one),
            flag("--cache", self.cache.is_some(), ginex, one),
            flag("--prepared", self.prepared.is_some(), packs, other),
            flag("--segment", self.segment.is_some(), diskgnn, "--strategy diskgnn"),
            flag("--no-prefetch", self.no_prefetch == Some(true), packs, other),
            flag(
                "--safe-point",
                self.safe_point.is_some(),
                packs || strategy == StrategyKind::Marius,
                "--strategy diskgnn, esker or marius",
            ),
        ]
    }

    fn of_models(&self, kind: Kind) -> Vec<FlagUse> {
        let (gat, neighbours) = (kind == Kind::Gat, kind != Kind::Mlp);
        let not_mlp = "a --model that has neighbours";
        vec![
            flag("--aggregator", self.aggregator.is_some(), kind == Kind::Sage, "--model sage"),
            flag("--gcn-degree", self.gcn_degree.is_some(), kind == Kind::Gcn, "--model gcn"),
            flag("--heads", self.heads.is_some(), gat, "--model gat"),
            flag("--output-heads", self.output_heads.is_some(), gat, "--model gat"),
            flag("--head-merge", self.head_merge.is_some(), gat, "--model gat"),
            flag("--attention-dropout", self.attention_dropout.is_some(), gat, "--model gat"),
            flag("--projected-dropout", self.projected_dropout.is_some(), gat, "--model gat"),
            flag("--gin-epsilon", self.gin_epsilon.is_some(), kind == Kind::Gin, "--model gin"),
            flag("--fanout", self.fanout.is_some(), neighbours, not_mlp),
            flag("--eval-fanout", self.eval_fanout.is_some(), neighbours, not_mlp),
            flag("--form", self.form.is_some(), neighbours, not_mlp),
            flag("--direction", self.direction.is_some(), neighbours, not_mlp),
        ]
    }

    fn of_optimizers(&self, kind: OptimizerKind) -> Vec<FlagUse> {
        let sgd = kind == OptimizerKind::Sgd;
        let adam = matches!(kind, OptimizerKind::Adam | OptimizerKind::AdamW);
        vec![
            flag("--momentum", self.momentum.is_some(), sgd, "--optimizer sgd"),
            flag("--nesterov", self.nesterov == Some(true), sgd, "--optimizer sgd"),
            flag("--betas", self.betas.is_some(), adam, "--optimizer adam or adamw"),
            flag("--epsilon", self.epsilon.is_some(), !sgd, "--optimizer adam, adamw or adagrad"),
        ]
    }
}
