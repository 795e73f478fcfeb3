"""The order of operations, as an effect. Uses what JAX has no public names for: the only file that does."""

from jax._src import effects
from jax._src.core import trace_state_clean  # noqa: F401
from jax._src.dispatch import runtime_tokens


class _Order(effects.Effect):
    """One sequence of operations for each process."""

    __str__ = lambda _: "bps"  # noqa: E731


ORDER = _Order()
for _allowed in (
    effects.lowerable_effects,
    effects.ordered_effects,
    effects.control_flow_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.remat_allowed_effects,
):
    _allowed.add_type(_Order)


def forget_failure():
    """Begins the sequence of this thread anew: a token of a program that failed would fail all that come after it."""
    runtime_tokens.current_tokens.pop(ORDER, None)
    runtime_tokens.output_runtime_tokens.clear()
