"""What a caller of `petune.train` may hang into a run: a protocol, and the one place that calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from petune.errors import UsageError


class Callback(Protocol):
    """Called by `petune.train` while it trains. Subclass it and write the methods you need; True from on_step
    or on_eval ends the run.

    A run that is ended so is evaluated, saved and finished like any other. An exception in a callback ends
    the run with a UsageError.

        >>> class Enough(petune.Callback):
        ...     def on_eval(self, step, metrics):
        ...         return metrics["eval_loss"] < 0.1
    """

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After optimizer step `step` (from 1); `metrics`: epoch, loss, lr, grad_norm, tokens,
        tokens_per_s."""
        return None

    def on_eval(self, step: int, metrics: Mapping[str, Any]) -> bool | None:
        """After each evaluation of the tuned model; `metrics`: epoch, eval_loss and the other scores of the
        task, each as eval_NAME."""
        return None

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Once, when the run has finished; `summary` is what summary.json holds."""
        return None


_METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))


class Callbacks:
    """Every callback of a run, to which it hands on what a Callback is told. `ended_by` names the one that
    asked for its end."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        """Raises UsageError for an object without the methods of a callback."""
        for one in callbacks:
            lost = [name for name in _METHODS if not callable(getattr(one, name, None))]
            if lost or isinstance(one, type):
                what, remedy = "this is not a callback", "give an object of a subclass of petune.Callback"
                expected = "an object, not a class" if isinstance(one, type) else ", ".join(lost)
                raise UsageError(
                    what, where="callbacks", expected=expected, found=repr(one)[:80], remedy=remedy
                )
        self.callbacks = tuple(callbacks)
        self.ended_by: str | None = None

    def on_step(self, record: Mapping[str, Any]) -> None:
        self._call("on_step", int(record["step"]), record)

    def on_eval(self, record: Mapping[str, Any]) -> None:
        self._call("on_eval", int(record["step"]), record)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        for one in self.callbacks:
            self._ask(one, "on_end", int(summary["steps"]), dict(summary))

    def _call(self, method: str, step: int, record: Mapping[str, Any]) -> None:
        metrics = {key: value for key, value in record.items() if key != "step"}
        for one in self.callbacks:
            answer = self._ask(one, method, step, step, dict(metrics))
            if answer is not None and not isinstance(answer, bool):
                where, found = f"{type(one).__name__}.{method}", repr(answer)[:80]
                what = "a callback answers True, which ends the run, False or None"
                raise UsageError(what, where=where, found=found, remedy="return one of these")
            if answer:
                self.ended_by = self.ended_by or type(one).__name__

    def _ask(self, one: Callback, method: str, step: int, *arguments: Any) -> Any:
        try:
            return getattr(one, method)(*arguments)
        except Exception as error:
            what = f"the callback failed at step {step}: {type(error).__name__}: {error}"
            remedy = "mend it; resume=True goes on from the newest checkpoint"
            raise UsageError(what, where=f"{type(one).__name__}.{method}", remedy=remedy) from error
