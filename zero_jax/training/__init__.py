"""The train step: train state, gradients, update and evaluation, sharded as `ZeroConfig` says.

`init_state` makes the state sharded, `make_train_step` the jitted step: it casts and places the params, takes the
gradients of the user's loss function (`grads`, with the transforms) over microbatches, calls the optimizer and pins the
new state to the shardings of the old one. `losses` and `sequence_parallel` are for models with a `model` axis.
"""

from zero_jax.training import losses
from zero_jax.training.batch import check_batch, place_batch, shapes_of_batch, shard_batch
from zero_jax.training.compiled_step import Metrics, TrainStep
from zero_jax.training.ema import check_decay, ema_params, params_ema
from zero_jax.training.evaluation import make_eval_step
from zero_jax.training.grads.norm import global_norm
from zero_jax.training.loss.function import (
    LossFunction,
    MeshLoss,
    key_parameter,
    user_loss,
)
from zero_jax.training.loss.param_uses import ParamUses
from zero_jax.training.loss.program import StepLoss, cast_batch
from zero_jax.training.loss.residuals import MEMORY_ROOM, chosen_values, value_costs, with_values
from zero_jax.training.loss.trace import (
    LossTrace,
    pipeline_report,
    share_staying,
    to_experts,
    trace_loss,
    trace_step_loss,
)
from zero_jax.training.losses import softmax_cross_entropy_with_integer_labels
from zero_jax.training.noise_scale import NoiseScale
from zero_jax.training.optimizer.offload import Offload
from zero_jax.training.optimizer.rounding import round_state, round_tree, rounding_key
from zero_jax.training.optimizer.update import Offers, call_update
from zero_jax.training.same_program import equal_parts, fingerprint, part_of_batch, releases
from zero_jax.training.sequence_sharding import sequence_parallel
from zero_jax.training.state.checks import (
    NonfiniteState,
    check_is_state,
    check_not_donated,
    nonfinite_counts,
    nonfinite_leaves,
    remember_copies,
    warn_of_lost_copies,
)
from zero_jax.training.state.making import abstract_state, checked_variables, init_state, with_gathered_params
from zero_jax.training.state.matrix_updates import matrix_dealings, step_placement
from zero_jax.training.state.placement import Placement, make_placement
from zero_jax.training.state.shardings import ShardingReport, sharding_report, state_shardings
from zero_jax.training.state.train_state import TrainState, merge, trainable, trained_params, used_by_optimizer
from zero_jax.training.state.whole_leaves import read_leaf, read_leaves, write_leaf, write_leaves
from zero_jax.training.step import make_train_step
from zero_jax.training.xla_options import CompilerOption, StepOptions, compiler_options, flag_words, step_options
from zero_jax.training.zero_config import ZeroConfig
