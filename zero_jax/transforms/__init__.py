"""Function in, function out: transforms of a loss function by its jaxpr.

`attention/` computes attention by a fused kernel, `gather/` gathers each sharded param where it is used, `remat/`
recomputes blocks in the backward pass, `pipeline/` makes scans over layers stages of a pipeline, `low_rank/` makes
frozen weights with low-rank updates where they are used, `separable/` decides whether a loss may be called on parts
of a batch, `kernels` and `roofline` estimate what a compiler makes of it, `blocks` finds the layers of a Python loop.
All read jaxprs through `zero_jax.program`, and dims through `zero_jax.dims`. `for_xla/` mends what XLA partitions
wrongly, or lays out badly. `facts` says what values are made of, and where they are read last.
"""

from zero_jax.transforms.attention.report import AttentionReport
from zero_jax.transforms.attention.transform import attention_report, fuse_attention
from zero_jax.transforms.flops import count_flops, training_flops
from zero_jax.transforms.for_xla.layouts import LANES, features_in_rows, heads_by_tiles, laid_out, wants_rows
from zero_jax.transforms.for_xla.own_examples import own_examples
from zero_jax.transforms.for_xla.row_lookups import lookups_by_place
from zero_jax.transforms.for_xla.windows import complex_sums_by_part, unsharded_windows
from zero_jax.transforms.gather.deferred import GatherOptions, HostParam, differentiated, used_shapes, with_gradient
from zero_jax.transforms.gather.per_device import DeviceSum
from zero_jax.transforms.gather.transform import GatherReport, gather_on_use, gather_report, gathered
from zero_jax.transforms.grad_sums import SummedStacks, without_derivatives
from zero_jax.transforms.kernels import Kernel, kernels
from zero_jax.transforms.low_rank.walk import AdaptedReport, WeightUse, evaluate_adapted
from zero_jax.transforms.low_rank.weight import Weight
from zero_jax.transforms.pipeline.convolutions import convolutions_as_products
from zero_jax.transforms.pipeline.cut import Stages
from zero_jax.transforms.pipeline.place import Schedule, StagePlace, resolve_schedule
from zero_jax.transforms.pipeline.report import PipelineReport
from zero_jax.transforms.pipeline.rolled import RolledProgram
from zero_jax.transforms.pipeline.transform import MovedGrads, PipelinedProgram, with_stages
from zero_jax.transforms.remat.choice import ValueChoice, choose_values
from zero_jax.transforms.remat.costs import BlockCosts
from zero_jax.transforms.remat.policies import Remat, resolve_remat
from zero_jax.transforms.remat.report import RematReport, ResidualBytes
from zero_jax.transforms.remat.transform import block_costs, remat_report, rematerialize
from zero_jax.transforms.roofline import KERNEL_SECONDS, KERNEL_SHARES, Roofline, efficiency_of
from zero_jax.transforms.separable.counts import CountedProgram, weight_alone
from zero_jax.transforms.separable.separability import BatchParts, Separability, separability
from zero_jax.transforms.separable.weights import PartWeight, with_weight
