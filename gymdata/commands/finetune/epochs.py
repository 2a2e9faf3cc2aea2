"""The shipped trainer, ``_type: epochs``: collect, select, make data, train, validate, and the same again.

Invariants: a stage starts only when those before it are done, and its output is on disk before the state says so;
sampling, judging and training are never two at a time; a job that failed ends the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import orjson

from gymdata.commands.finetune import figures
from gymdata.commands.finetune.plan import Judging, Plan, Watch, make_data
from gymdata.commands.finetune.port import (
    CollectOrder,
    EpochRow,
    HeldOut,
    TrainerAdapter,
    TrainingJob,
    TrajectoryBuilder,
)
from gymdata.commands.finetune.selection import Source, select
from gymdata.commands.finetune.state import State
from gymdata.errors import RefusedError, UsageError, counted
from gymdata.public import Figures
from gymdata.store import hash_file, write_run_json
from gymdata.store.run_json import plain, replacing, write_json
from gymdata.user_code import place_of

_SEEDS_AN_EPOCH = 1000  #: each epoch draws its own samples


class EpochLoop:
    """Implements ``port.Trainer``."""

    def run(self, plan: Plan, builder: TrajectoryBuilder, adapter: TrainerAdapter, watch: Watch) -> Figures:
        """Run or resume; returns the content of result.json."""
        adapter.data(plan.loop.algorithm)  # an algorithm that the trainer lacks is reported before anything is sampled
        state = State.open(plan.output, plan.identity, plan.defaults, overwrite=plan.overwrite)
        try:
            return _Run(plan, builder, adapter, watch, state).run()
        except KeyboardInterrupt:
            stage = state.running()
            state.end("interrupted", "interrupted")
            watch.message(f"{plan.output}: stopped{stage}; rerun the same command to resume")
            raise
        except Exception as error:  # user code may raise anything
            state.end("failed", str(error))
            raise
        finally:
            state.close()


class _Run:
    """One call of the loop over one folder."""

    def __init__(
        self, plan: Plan, builder: TrajectoryBuilder, adapter: TrainerAdapter, watch: Watch, state: State
    ) -> None:
        self.plan, self.builder, self.adapter, self.watch, self.state = plan, builder, adapter, watch, state
        self.rows: list[EpochRow] = []

    def run(self) -> Figures:
        plan = self.plan
        self._describe("running")
        if plan.validated(0):
            self._stage(0, "validate", lambda: self._validate(0, plan.start, 0))
        policy, version = plan.start, 0
        for epoch in range(1, plan.loop.num_epochs + 1):
            fresh = self.state.done(epoch, "log") is None
            policy, version = self._epoch(epoch, policy, version)
            self._publish()
            if fresh:
                self.watch.epoch(self.rows[-1])
        result = self._result(policy, version)
        write_json(plan.output / "result.json", plain(result))
        self.state.end("completed")
        self._describe("completed", policy)
        # The page of a run that is over has its result.
        self._publish()
        return result

    def _stage(self, epoch: int, name: str, work: Callable[[], Figures]) -> Figures:
        """The stage's result: from the state when it is done, else by running it."""
        if (result := self.state.done(epoch, name)) is not None:
            return result
        self.state.begin(epoch, name)
        self.watch.stage(epoch, name)
        result = dict(work())
        self.state.finish(epoch, name, result)
        return result

    def _epoch(self, epoch: int, policy: Path, version: int) -> tuple[Path, int]:
        """The policy that the epoch leaves, and its version."""
        plan, folder = self.plan, self.plan.folder(epoch)
        self._stage(epoch, "collect", lambda: self._collect(epoch, policy, version))
        self._stage(epoch, "check", lambda: self._check(epoch))
        if plan.judging is not None:
            judging = plan.judging
            self._stage(epoch, "judge", lambda: self._judge(folder / "rollouts", judging))
        chosen = self._stage(epoch, "select", lambda: self._select(epoch, version))
        data = self._stage(
            epoch,
            "data",
            lambda: make_data(plan, folder, self._reads(), chosen, self.watch, self._kl_coef(epoch)),
        )
        trained = self._stage(epoch, "train", lambda: self._train(epoch, policy, version, data))
        policy_of = int(trained["policy_of_epoch"])
        after = plan.folder(policy_of) / "policy" if policy_of else plan.start
        next_version = int(trained["next_policy_version"])
        if plan.loop.deploy is not None and next_version != version:
            self._stage(epoch, "deploy", lambda: self._deploy(epoch, after, next_version))
        kl: Figures = {}
        if plan.trainer.measure_kl and not plan.served:
            kl = self._stage(epoch, "kl", lambda: self._kl(epoch, version))
        validation = self.state.done(epoch, "validate")  # done already where it was the last epoch once
        if plan.validated(epoch):
            validation = self._stage(epoch, "validate", lambda: self._validate(epoch, after, next_version))
        facts = {
            "epoch": epoch,
            "algorithm": plan.loop.algorithm,
            "policy_version": version,
            **chosen,
            **{k: v for k, v in data.items() if k != "path"},
            **{k: v for k, v in trained.items() if k not in ("policy_of_epoch", "next_policy_version")},
            "kl_to_start": kl.get("kl_k3"),
            "validation": validation,
        }
        row = cast("EpochRow", self._stage(epoch, "log", lambda: facts))
        if row["validation"] is None and validation is not None:
            row["validation"] = cast("HeldOut", validation)
        self.rows.append(row)
        return after, next_version

    def _sample(self, builder: TrajectoryBuilder, run: Path, policy: Path, version: int, order: Figures) -> None:
        """Rollouts of ``policy``, or of the one that an endpoint serves: without ``deploy`` it keeps the first."""
        plan = self.plan
        sampled = version if not plan.served or plan.loop.deploy is not None else 0
        model = None if plan.served else str(policy)
        builder.collect(CollectOrder(output=run, model=model, policy_version=sampled, **order), self.watch)

    def _collect(self, epoch: int, policy: Path, version: int) -> Figures:
        plan, run = self.plan, self.plan.folder(epoch) / "rollouts"
        order = {
            "tasks": plan.tasks,
            "run_id": f"{self.state.run_id}-epoch-{epoch:03d}",
            "seed": plan.loop.seed * _SEEDS_AN_EPOCH + epoch,
            "reward": plan.reward,
            "settings": {} if plan.loop.limit is None else {"limit": plan.loop.limit},
        }
        self._sample(self.builder, run, policy, version, order)
        return {"path": str(run), "missing": figures.missing(run)}

    def _check(self, epoch: int) -> Figures:
        """Raises for rollouts with faults, which are not trained on. A missing score is no fault: the selection counts
        it."""
        run = self.plan.folder(epoch) / "rollouts"
        log = self.plan.folder(epoch) / "logs" / "check.log"
        result = self.plan.commands.run(["validate", str(run), "--ignore", "R501"], log, self.watch)
        if result["exit_code"]:
            errors = counted(result["errors"], "error") if "errors" in result else "errors"
            raise RefusedError(f"epoch {epoch}: the rollouts have {errors}", hint=f"gymdata validate {run}")
        return {"warnings": result.get("warnings")}

    def _judge(self, run: Path, judging: Judging) -> Figures:
        file = write_json(run.parent / f"{run.name}.judge.yaml", plain({**judging.settings, "name": judging.name}))
        log = run.parent / "logs" / f"{run.name}.judge.log"
        result = self.plan.commands.run(["judge", str(run), "--config", str(file)], log, self.watch)
        return {"comparisons": result.get("comparisons"), "unscored": result.get("unscored")}

    def _select(self, epoch: int, version: int) -> Figures:
        folder = self.plan.folder(epoch)
        source = _source(folder / "rollouts", self.plan.judging)
        counts = select(source, folder, epoch, version, self.plan.curriculum)
        lost = (self.state.done(epoch, "collect") or {}).get("missing")
        return {**counts, **figures.rewards(source.scores()), "missing": lost}

    def _kl_coef(self, epoch: int) -> float | None:
        """The coefficient that the last epoch before this one with experiences has left; None where none is adapted."""
        done = (self.state.done(before, "data") or {} for before in range(epoch - 1, 0, -1))
        return next((float(data["next_kl_coef"]) for data in done if "next_kl_coef" in data), None)

    def _train(self, epoch: int, policy: Path, version: int, data: Figures) -> Figures:
        loop = self.plan.loop
        if data.get("skipped"):
            policy_epoch = int(policy.parent.name.removeprefix("epoch-")) if version else 0
            return {"policy_of_epoch": policy_epoch, "next_policy_version": version, "skipped": data["skipped"]}
        output = self.plan.folder(epoch) / "policy"
        job = TrainingJob(
            job_id=f"{self.state.run_id}-epoch-{epoch:03d}",
            epoch=epoch,
            algorithm=loop.algorithm,
            data=Path(data["path"]),
            model=policy,
            output=output,
            seed=loop.seed,
        )
        self.adapter.train(job, self.watch)
        return {"policy_of_epoch": epoch, "next_policy_version": version + 1, **figures.trained(output)}

    def _reads(self) -> str:
        """The kind of data that the adapter trains on. Raises UsageError for another value than a text."""
        kind = self.adapter.data(self.plan.loop.algorithm)
        if not isinstance(kind, str):
            raise UsageError.bad_value(f"the adapter's data ({place_of(self.adapter.data)})", kind, "a str")
        return kind

    def _deploy(self, epoch: int, policy: Path, version: int) -> dict[str, object]:
        from gymdata.commands.finetune.jobs import complete

        words = self.plan.loop.deploy or []
        command = [word.replace("{model}", str(policy)).replace("{version}", str(version)) for word in words]
        complete("finetuning.deploy", command, self.plan.folder(epoch) / "logs" / "deploy.log", self.watch)
        return {"policy_version": version}

    def _kl(self, epoch: int, version: int) -> Figures:
        """KL per token of the epoch's policy to the first one; 0 when it is the first."""
        if version == 0:
            return {"kl_k3": 0.0}
        plan, folder = self.plan, self.plan.folder(epoch)
        words = ["audit", str(folder / "rollouts"), "-m", str(plan.start), "-n", str(plan.trainer.measure_kl)]
        words += ["--dtype", "float32", "-o", str(folder / "kl"), "--overwrite"]
        result = plan.commands.run(words, folder / "logs" / "kl.log", self.watch)
        return {name: result[name] for name in ("kl_k1", "kl_k3", "tokens", "rollouts")}

    def _validate(self, epoch: int, policy: Path, version: int) -> Figures:
        plan = self.plan
        assert plan.validation is not None
        run, held_out = plan.folder(epoch) / "validation", plan.validation
        run_id = f"{self.state.run_id}-validation-{epoch:03d}"
        order = {"tasks": held_out.tasks, "run_id": run_id, "seed": plan.loop.seed}
        order |= {"reward": held_out.reward, "settings": held_out.settings}
        self._sample(held_out.builder, run, policy, version, order)
        if (judging := held_out.judging) is not None:
            self._judge(run, judging)
        scores = _source(run, judging).scores()
        return {**figures.held_out(scores, held_out.threshold), "policy_version": version}

    def _publish(self) -> None:
        """metrics.jsonl and the report, regenerated from the epochs' rows."""
        lines = b"".join(orjson.dumps(plain(row)) + b"\n" for row in self.rows)
        with replacing(self.plan.output / "metrics.jsonl") as temporary:
            temporary.write_bytes(lines)
        if self.plan.write_page is not None:
            self.plan.write_page(self.plan.output)

    def _result(self, policy: Path, version: int) -> Figures:
        plan = self.plan
        validations = {e: v for e in range(plan.loop.num_epochs + 1) if (v := self.state.done(e, "validate"))}
        result: Figures = {
            "status": "completed",
            "run_id": self.state.run_id,
            "algorithm": plan.loop.algorithm,
            "epochs": plan.loop.num_epochs,
            "policy": str(policy),
            "policy_version": version,
            "metrics": str(plan.output / "metrics.jsonl"),
            "report": str(plan.output / "report.html"),
            "reward_first": self.rows[0]["reward_mean"],
            "reward_last": self.rows[-1]["reward_mean"],
            **({} if (left := self._kl_coef(plan.loop.num_epochs + 1)) is None else {"next_kl_coef": left}),
            "trained_tokens": sum(row.get("trained_tokens") or 0 for row in self.rows),
        }
        if validations:
            first, last = min(validations), max(validations)
            result["validation"] = {
                "first": {"epoch": first, **validations[first]},
                "last": {"epoch": last, **validations[last]},
            }
            if first != last and plan.validation is not None and plan.validation.judging is None:
                before, after = (plan.folder(e) / "validation" for e in (first, last))
                result["validation"]["difference"] = figures.rise(before, after, plan.validation.threshold)
        return result

    def _describe(self, status: str, policy: Path | None = None) -> None:
        parents = []
        if policy is not None:
            file = policy / "run.json"
            parents = [{"path": str(policy.resolve()), "run_json_xxh3": hash_file(file) if file.is_file() else None}]
        left = self._kl_coef(self.plan.loop.num_epochs + 1)
        write_run_json(
            self.plan.output,
            {
                **self.plan.facts,
                **({} if left is None else {"next_kl_coef": left}),
                "stage": "finetune",
                "run_id": self.state.run_id,
                "status": status,
                "identity": self.plan.identity,
                "parents": parents,
            },
        )


def _source(run: Path, judging: Judging | None) -> Source:
    return Source(run, None if judging is None else run / f"judge-{judging.name}")
