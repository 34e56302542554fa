"""The data sets of a job: what is in each of them, and in which order its rows are trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from elastic_spark.checkpoint import Checkpoint
from elastic_spark.config import JobConfig
from elastic_spark.core import events as ev
from elastic_spark.core.lanes import LanePlan, choose_lanes
from elastic_spark.core.manifest import Manifest
from elastic_spark.core.resume import differences, noted
from elastic_spark.errors import ResumeRefused


@dataclass(frozen=True)
class Datasets:
    """By name: the frozen description of each, and the order of its rows."""

    manifests: Mapping[str, Manifest]
    plans: Mapping[str, LanePlan]

    @classmethod
    def freeze(
        cls, data: Mapping[str, Any], settings: JobConfig, base: str, before: Mapping[str, Mapping[str, Any]]
    ) -> Datasets:
        """Freeze what is not yet frozen below the URI ``base``. ``before``: what the checkpoint to go on from notes of
        each data set; lanes are taken from there, as their default depends on ``max_num_proc``, which may be another
        one now."""
        assert settings.max_num_proc is not None
        manifests: dict[str, Manifest] = {}
        plans: dict[str, LanePlan] = {}
        for name, source in data.items():
            if isinstance(source, Manifest):
                manifest = source
            else:
                from elastic_spark.driver.freeze import freeze

                manifest = freeze(source, f"{base.rstrip('/')}/{name}", name=name)
            held = before.get(name, {}).get("lanes")
            lanes = settings.lanes or held or choose_lanes(settings.max_num_proc, settings.global_batch, manifest.rows)
            manifests[name] = manifest
            plans[name] = LanePlan(manifest.group_rows, lanes, settings.global_batch, settings.seed, settings.shuffle)
        return cls(manifests, plans)

    def notes(self) -> dict[str, dict[str, Any]]:
        """What each checkpoint notes of them."""
        return {name: noted(plan, self.manifests[name].digest) for name, plan in self.plans.items()}

    def require_the_order_of(self, checkpoint: Checkpoint) -> None:
        """Raises ResumeRefused where going on from the checkpoint would silently break a guarantee."""
        found = differences(checkpoint.fields.get("plans", {}), self.notes(), checkpoint.fields.get("cursors", {}))
        if found:
            raise ResumeRefused(
                f"the checkpoint {checkpoint.uri} (step {checkpoint.step}) is not one of this order of rows: "
                f"{'; '.join(found)}. To begin anew, choose another job_name"
            )

    def frozen(self, name: str, now: float) -> ev.DatasetFrozen:
        """The fact that it is a data set of the job."""
        manifest, plan = self.manifests[name], self.plans[name]
        return ev.DatasetFrozen(
            at=now,
            dataset=name,
            rows=plan.rows,
            digest=manifest.digest,
            lanes=plan.lanes,
            seed=plan.seed,
            global_batch=plan.global_batch,
            steps_per_epoch=plan.steps_per_epoch,
            row_groups=len(plan.groups),
            shuffle=plan.shuffle,
        )

    def for_workers(self) -> dict[str, Any]:
        """As JSON, for the workers' ``ctx``."""
        order = ("lanes", "global_batch", "seed", "shuffle")
        return {
            name: {
                "manifest": json.loads(self.manifests[name].to_json()),
                "groups": plan.groups,
                "plan": {field: getattr(plan, field) for field in order},
            }
            for name, plan in self.plans.items()
        }
