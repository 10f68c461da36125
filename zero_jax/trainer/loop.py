"""The training loop of `zero-jax train`: steps, evaluations, checkpoints, metrics and samples of a checked run."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax

from zero_jax.checkpoint import Checkpointer
from zero_jax.cluster import Preemption, Watchdog, report_end, report_start
from zero_jax.core.agreement import Agreement
from zero_jax.core.tree import leaf_names
from zero_jax.trainer.callbacks import call_all
from zero_jax.trainer.checkpoints import ResumeError, Saver, Start, begin
from zero_jax.trainer.evaluation import Validation
from zero_jax.trainer.inputs.sources import BatchesEnded, Together
from zero_jax.trainer.reporting.console import Console, describe_run, groups, lasting, num_params
from zero_jax.trainer.reporting.curves import RunRecords
from zero_jax.trainer.reporting.metrics import Dispatched, Log, Progress, make_speedometer, per_device_bytes
from zero_jax.trainer.reporting.profiler import Profiler
from zero_jax.trainer.reporting.trackers import TrackedRun
from zero_jax.trainer.reporting.writers import open_writers
from zero_jax.trainer.result import EXIT_STATUS, TrainResult, draw_losses, run_losses
from zero_jax.trainer.run import Run
from zero_jax.trainer.run_folder import held, save_config
from zero_jax.training import NoiseScale, check_not_donated, global_norm, trainable


class Training:
    """A run that is being executed; the stack closes its resources.

    Attributes:
      log: shows a line where there is no bar, and above the bar once there is one.
      state: the train state after `step` steps; both are of the last step that was dispatched.
      position: the position in the data after that step's batch.
      waiting: that step, until its metrics are read.
      executed: the phases that were executed once, and so are compiled.
    """

    def __init__(self, run: Run, *, log: Log, terminal: TextIO | None, stack: contextlib.ExitStack):
        """Makes or restores the state, and opens the run's batches, checkpoints and writers."""
        self.run, self.config = run, run.config
        config, mesh = run.config, run.mesh
        self.is_first, self.executed = jax.process_index() == 0, set[str]()
        if not self.is_first:  # all processes run the same code; one of them speaks
            log, terminal = lambda _: None, None
        self.log = lasting(log, is_stopping=lambda: self.preemption.request("SIGPIPE"))
        self.preemption = Preemption(log=self.log)
        stack.enter_context(held(run.folder, is_new=run.has_new_folder))
        if not (run.folder / "config.json").exists():  # a resumed run's configs stay until it has been restored
            self._save_configs()
        place = {"process_index": jax.process_index(), "num_processes": jax.process_count()}
        self.watchdog = stack.enter_context(Watchdog(config.hang_seconds, run.folder / "processes", **place))
        stack.enter_context(self.preemption)
        self.checkpointer = stack.enter_context(
            Checkpointer(run.checkpoints, config=config.checkpoint, log=self.say, run=str(run.folder))
        )
        self.checkpointer.take()  # a folder that another run uses is refused now, and not at the first save
        start = begin(run)
        # Before anything that one process alone may fail at: processes compute together here.
        self.saver = Saver(self.checkpointer, run=run, start=start, say=self.say)
        self.state, self.step, self.waiting = start.state, start.step, None
        self.first_step, self.is_evaluated = start.step, start.is_evaluated
        self.console = Console(config.steps, config.log_every, log=self.log, terminal=terminal, first_step=start.step)
        stack.callback(self.console.close)
        self.log = self.console.line  # which shows lines above the bar
        for line in (describe_run(run, self.state), *start.lines):
            self.say(line)
        self.sample = None if run.input.sampler is None else run.input.sampler.on(mesh)
        self.norm = jax.jit(lambda params: global_norm(jax.tree.leaves(params)).value)
        self.batches: Any = stack.enter_context(self._open_batches(start))
        self._save_configs()
        self.together, self.position = Together("batches"), self.batches.position
        self.validation = None
        if run.input.validation is not None:
            self.validation = Validation(run.model, run.input, mesh=mesh, config=run.zero, say=self.say)
        self.progress = Progress(
            sinks=self._open_sinks(start, stack) if self.is_first else [],
            speedometer=make_speedometer(run.model.loss_fn, run.tx, self.state, run.input, mesh=mesh, config=run.zero),
            schedule=run.schedule,
            param_names=leaf_names(self.state.params),
            noise=NoiseScale.from_json(start.noise) if start.noise else NoiseScale(),
            log_every=config.log_every,
            own=run.input.figures,
        )

    def say(self, line: str) -> None:
        """Shows a line, in process 0 alone."""
        self.log(line)

    def _save_configs(self) -> None:
        if self.is_first:
            save_config(self.run.folder, self.run.saved_config)
            self.run.save_options(self.run)

    def execute(self) -> TrainResult:
        """Runs the steps, and ends the run: its last save, a sample, and a picture of its losses."""
        try:
            with Agreement():
                status = self._run_steps()
        except Exception as error:
            self._save_before(error)
            raise
        self._beat("save")
        if status != "diverged" and not self.saver.wait_until_saved(self.step):
            status = "preempted_unsaved" if status == "preempted" else "unsaved"
        if status in ("done", "stopped") and self._is_untrained():
            status = "skipped"
        if advice := self.progress.noise.advice(self.run.input.batch_size):
            self.say(advice)
        # After the last save is complete: a sample that fails costs no state.
        sample = self._log_sample() if status in ("done", "stopped", "unsaved") else ""
        self.console.close()  # the last lines stay, and the bar does not
        self._beat("end")
        losses = run_losses(self.run.folder, train=self.progress.train, validation=self.progress.validation)
        loss_curve = self._draw(losses) if self.is_first else None
        if self.is_first:
            # To a launcher, as a script may end with 0 whatever the status of its run is.
            report_end(EXIT_STATUS[status] if status.startswith("preempted") else 0)
        return self._result(status, losses, sample=sample, loss_curve=loss_curve)

    def _result(self, status: str, losses: RunRecords, *, sample: str, loss_curve: str | None) -> TrainResult:
        noise, validates = self.progress.noise.estimate, self.validation is not None
        return TrainResult(
            status=status,
            directory=str(self.run.folder),
            model=self.run.model.name,
            stage=self.config.zero.stage,
            num_devices=self.run.mesh.size,
            num_params=num_params(self.state.params),
            num_steps=self.step,
            num_skipped_steps=int(self.state.num_skipped_steps),
            num_failed_saves=self.checkpointer.num_failed,
            first_train_loss=_loss_at(losses.train, 0),
            final_train_loss=_loss_at(losses.train, -1),
            first_validation_loss=_loss_at(losses.validation, 0) if validates else None,
            final_validation_loss=_loss_at(losses.validation, -1) if validates else None,
            compile_seconds=self.progress.compile_seconds,
            train_seconds=self.progress.seconds,
            noise_scale=None if noise is None else noise.num_examples,
            prompt=self.config.sample_prompt,
            sample=sample,
            loss_curve=loss_curve,
            **{"tokens_per_second": None, **self.progress.throughput},
            **{f"per_device_{name}_bytes": per_device_bytes(tree) for name, tree in groups(self.state).items()},
        )

    def _is_untrained(self) -> bool:
        """Tells whether every step of the run was skipped, and logs it."""
        if not 0 < self.step == int(self.state.num_skipped_steps):
            return False
        leaf = self.progress.nonfinite_leaf
        self.say(
            f"all {self.step} steps were skipped, the last because the gradient of {leaf} was not finite: the params "
            "are those of the start. A smaller loss or learning rate, bf16 or fp32 in place of fp16, or other data may "
            "help"
        )
        return True

    def _open_batches(self, start: Start) -> contextlib.AbstractContextManager[Any]:
        try:
            return self.run.input.open(start.data, say=self.say, beat=lambda: self._beat("data", self.step))
        except ValueError as error:
            if start.data is None:
                raise
            raise ResumeError(str(error)) from error

    def _open_sinks(self, start: Start, stack: contextlib.ExitStack) -> list[Callable[[Any], None]]:
        run = self.run
        # A run that was cut off before its first checkpoint has records too, from step 0 on.
        resume_step = (start.step or -1) if self.config.resume == "auto" else None
        tracked = TrackedRun(name=run.folder.name, folder=run.folder, config=run.saved_config, resume_step=resume_step)
        settings = {"own": run.trackers, "is_evaluated": start.is_evaluated, "log": self.say}
        writers = stack.enter_context(contextlib.closing(open_writers(self.config.log, tracked, **settings)))
        return [writers.write, self.console.step]

    def _draw(self, losses: RunRecords) -> str | None:
        """Plots the losses; returns the path of the picture, or None if it could not be drawn."""
        title = f"{self.run.model.name}, ZeRO stage {self.config.zero.stage} on {self.run.mesh.size} devices"
        path = self.run.folder / "loss.png"
        failure = draw_losses(path, losses, title=title, is_hurried=lambda: self.preemption.reason is not None)
        if failure:
            self.say(f"no picture of the loss: {failure}")
        return None if failure else str(path)

    def _beat(self, phase: str, step: int | None = None) -> None:
        """Reports a phase to the watchdog; the first execution of a phase compiles, and autotunes kernels."""
        is_new = phase in ("step", "evaluation", "sample", "callbacks") and phase not in self.executed
        self.watchdog.beat("compile" if is_new else phase, self.step if step is None else step)

    def _read_waiting(self, then: Dispatched | None = None) -> None:
        """Waits for the waiting step, if there is one, and records its metrics; `then` is the one that waits next."""
        dispatched, self.waiting = self.waiting, then
        if dispatched is None:
            return
        self.progress.add_step(dispatched)
        if self.is_first and "step" not in self.executed:
            report_start(self.first_step)
        self.executed.add("step")

    def _run_steps(self) -> str:
        """Runs the steps, and returns the status; the metrics of a step are read after the next one is dispatched."""
        config = self.config
        if self.step < config.steps:
            self.say("compiling       seconds for a small model, minutes for a large one")
        if self.validation is not None and not self.is_evaluated and self.step % config.eval_every == 0:
            self._evaluate(is_last=self.step == config.steps)
        if self.step < config.steps and self.preemption.should_stop(self.step):
            return "preempted"
        with Profiler(config.profiled, self.run.folder / "profile", say=self.say) as profiler:
            while self.step < config.steps:
                # While the devices are busy with the new step, the metrics of the one before are read.
                self._read_waiting(self._dispatch(profiler))
                status = self._end_early() if self.waiting is None else self._after_step(profiler)
                if status is not None:
                    return status
        return "done"

    def _after_step(self, profiler: Profiler) -> str | None:
        """Evaluates, saves and samples if it is time; returns a status if the run ends before its last step."""
        config, progress, step = self.config, self.progress, self.step
        # Called at every step, as the processes agree on it.
        stops = self.preemption.should_stop(step)
        is_last = step == config.steps
        evaluates = self.validation is not None and (is_last or step % config.eval_every == 0)
        saves = stops or is_last or self.checkpointer.is_due(step)
        samples = not is_last and config.sample_every > 0 and step % config.sample_every == 0
        callbacks = [callback for callback in self.run.callbacks if step % callback.every == 0]
        # Only here are the devices waited for: what follows is about the state after this very step.
        if evaluates or saves or samples or callbacks or step == config.profiled.stop - 1:
            self._read_waiting()
            profiler.done(step)
        if progress.num_nonfinite_in_a_row >= config.max_nonfinite_steps:
            leaf = progress.nonfinite_leaf or "no param (only the loss)"
            row = f"{progress.num_nonfinite_in_a_row} steps in a row were not finite"
            self.saver.log_divergence(step, f"{row}, first in the gradient of {leaf}")
            return "diverged"
        loss = None
        # Before the save, which records the loss; not after a signal, which may leave seconds to save in.
        if evaluates and (is_last or not stops):
            loss = self._evaluate(is_last=is_last)
            stops = stops or (loss is None and self.preemption.should_stop(step))  # a signal has cut it off
        if (saves or stops) and not self._save(loss, is_last=stops or is_last):
            return "diverged"
        if samples and not stops:
            self._log_sample()
        if callbacks:  # once the state is saved, if it is time for that
            self._beat("callbacks")
            stopping = call_all(callbacks, step, progress.metrics(), self.state)
            self.executed.add("callbacks")
            if stopping and not is_last:
                self.say(f"stopping at step {step} of {config.steps}: {stopping} returned True")
                return self._end("stopped", loss)
        progress.resume_clock()
        return "preempted" if stops and not is_last else None

    def _end_early(self) -> str:
        self.say(
            f"stopping at step {self.step} of {self.config.steps}: there are no more batches. Give batches that begin "
            "again at their end (a list, a dataset, a function of nothing that returns an iterator), or fewer steps"
        )
        return "ended" if self.saver.has(self.step) else self._end("ended", None)

    def _end(self, status: str, loss: float | None) -> str:
        """Evaluates the state, unless its validation loss is known, and saves it; returns the status of the end."""
        # The last state is judged and kept whatever the intervals are.
        loss = self._evaluate(is_last=True) if loss is None else loss
        if not self.saver.has(self.step):
            if not self._save(loss, is_last=True, has_read_more=self._may_have_read_more()):
                return "diverged"
        return status

    def _save_before(self, error: Exception) -> None:
        """Saves the state of the last step, if it is a good one, before an error of something else ends the run."""
        try:
            if self.saver.has(self.step):
                return
            with Agreement():
                check_not_donated(self.state)  # as the error of a step leaves it
            with contextlib.suppress(Exception):  # it may be the error of a writer
                self._read_waiting()
            self.say(f"stopping at step {self.step} of {self.config.steps}: {type(error).__name__}: {error}")
            if self._save(None, is_last=True, has_read_more=self._may_have_read_more()):
                self.saver.wait_until_saved(self.step)
        except Exception as second:  # the first one is what ends the run
            self.say(f"the state of step {self.step} is NOT SAVED: {second}")

    def _may_have_read_more(self) -> bool:
        """Returns whether a batch may be read that no step has used: in some of several processes, or here."""
        # What other processes have read is not known here, and after an error they cannot be asked.
        return jax.process_count() > 1 or self.position != self.batches.position

    def _dispatch(self, profiler: Profiler) -> Dispatched | None:
        """Dispatches the next step to the devices without waiting for it; None if there are no more batches."""
        self._beat("data", self.step + 1)
        waited_seconds = 0.0

        def read() -> Any:
            nonlocal waited_seconds
            start = time.perf_counter()
            batch = next(self.batches)
            waited_seconds = time.perf_counter() - start
            self._beat("step", self.step + 1)
            return self.run.input.place(batch)  # may wait for the devices

        try:
            batch = self.together.read(read)
        except BatchesEnded:
            return None
        with profiler.step(self.step + 1):
            # The state before is donated: from here on only the new one can be saved.
            self.state, metrics = self.run.train_step(self.state, batch)
        self.step, self.position = self.step + 1, self.batches.position
        shows_norm = self.step % self.config.log_every == 0
        return Dispatched(
            step=self.step,
            metrics=metrics,
            # Dispatched here, because the next step donates the params.
            param_norm=self.norm(trainable(self.state.params)) if shows_norm else None,
            data_wait_seconds=waited_seconds,
        )

    def _evaluate(self, *, is_last: bool) -> float | None:
        """Records and returns the validation loss; None without any, or if a signal left no time for it."""

        def continues() -> bool:
            self.executed.add("evaluation")
            self._beat("evaluation")
            return is_last or not self.preemption.stops_alone

        if self.validation is None:
            return None
        self._beat("evaluation")
        figures = self.validation.measure(self.state, goes_on=continues)
        if figures is None:
            return None
        self.progress.add_validation(self.step, figures)
        return figures["loss"]

    def _save(self, loss: float | None, *, is_last: bool, has_read_more: bool = False) -> bool:
        """Starts to save the state if it is finite; returns whether the run can continue."""
        self._beat("save")
        with Agreement():  # the position is the user's iterator's, which may fail in one process
            extra = {
                "data": self.run.input.record(self.position, has_read_more=has_read_more),
                "noise_scale": self.progress.noise.to_json(),
                "config": self.run.saved_config,
                "is_evaluated": loss is not None,
            }
        nonfinite = self.progress.num_nonfinite_in_a_row
        return self.saver.save(
            self.step, self.state, loss=loss, extra=extra, num_nonfinite_steps=nonfinite, is_last=is_last
        )

    def _log_sample(self) -> str:
        """Logs and returns text that the model generates after the prompt; '' without a sampler."""
        if self.sample is None:
            return ""
        self._beat("sample")
        with Agreement():  # all are here
            prompt = self.config.sample_prompt
        text = self.sample(self.state.params)
        self.executed.add("sample")
        self.say(f"\nstep {self.step}, a sample that goes on from {prompt!r}:\n\n{prompt}{text}\n")
        return text


def _loss_at(records: Sequence[dict[str, Any]], index: int) -> float:
    return records[index]["loss"] if records else math.nan
