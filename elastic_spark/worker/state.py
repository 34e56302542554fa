"""`ElasticState`: what must survive, and how.

A subclass of Horovod's elastic ``State``, so ``@hvd.elastic.run`` drives it: ``sync`` before the loop, ``restore``
after a failed collective, ``commit`` at the end of each step.

*Commit is a mark.* Parameters change only inside ``optimizer.step()``, after every collective of the step. A worker
that fails in a collective therefore still holds, in its live tensors, the parameters of its last commit. The mark keeps
what does change during a step: the cursor, plain attributes, buffers (batch norm), and the random generators. So
`restore` costs nothing, and no step is lost.

*A worker is dirty* when an optimizer has stepped since its last commit: then the live tensors are no longer those of
the mark. It falls back to its last snapshot (a copy of everything, taken at commits, as often as `SNAPSHOT_BUDGET`
allows), reports that older step, and takes the state of a peer that is ahead.

*A large state is copied late*: what only optimizers change is copied while the next step computes its gradients; see
`elastic_spark.worker.late`.

*Sync* makes all ranks equal to rank 0, which the driver chose because it holds the newest step. Ranks first compare a
SHA-256 of all they hold; where all agree nothing is sent. Otherwise rank 0 sends all of it into buffers, and only when
the whole has arrived do the others change: a fault in between leaves every survivor's own state whole. Then the hashes
are compared once more, and a difference ends the job with the name of the tensor.
"""

from __future__ import annotations

import copy
import hashlib
import json
import time
from collections import deque
from collections.abc import Mapping
from statistics import median_low
from typing import TYPE_CHECKING, Any

import horovod.torch as hvd
import torch
from horovod.common.elastic import State
from horovod.common.exceptions import HostsUpdatedInterrupt

from elastic_spark.errors import StateDiverged
from elastic_spark.worker import collective, marks, tree
from elastic_spark.worker.collective import Assignment
from elastic_spark.worker.commits import Commit, Drawn
from elastic_spark.worker.late import LateCopy, Torn, stepped
from elastic_spark.worker.memory import Snapshot
from elastic_spark.worker.pace import StepClock
from elastic_spark.worker.session import session

if TYPE_CHECKING:
    from elastic_spark.worker.data import Batch

#: Share of the time that snapshots may take; a state that is cheap to copy is copied at every commit. Checkpoints take
#: one besides: together with these, with marks and with writing, it is to stay at about one per cent.
SNAPSHOT_BUDGET = 0.0025
#: A snapshot that takes longer than this many seconds is made while training goes on.
LATE_FROM_S = 0.005
_CHUNK = 64 << 20


class ElasticState(State):  # type: ignore[misc]
    """Model, optimizers and whatever else must survive changes of the world, crashes and restarts.

    Args:
        objects: by name. Things with ``state_dict`` and ``load_state_dict`` (modules, optimizers, schedulers, scalers)
            are kept through these; everything else is a plain attribute: ``state.best_loss``.

    Attributes:
        step: committed optimizer steps, from the start of the job.
    """

    def __init__(self, **objects: Any) -> None:
        self.step = 0
        self._objects = {name: item for name, item in objects.items() if _has_state(item)}
        self._names = [name for name in objects if name not in self._objects]
        for name, item in objects.items():
            if name.startswith("_") or hasattr(type(self), name) or name == "step":
                raise ValueError(f"ElasticState cannot keep something under the name {name!r}: choose another")
            setattr(self, name, item)
        super().__init__(bcast_object=hvd.broadcast_object, get_rank=hvd.rank)
        self._cursors: dict[str, tuple[int, int]] = {}
        self._drawn: dict[str, list[Drawn]] = {}
        self._optimizer_steps = 0
        self._clock = StepClock()
        collective.watch_waits(self._clock.awaits_others, self._clock.goes_on)
        self._optimizers = [item for item in self._objects.values() if isinstance(item, torch.optim.Optimizer)]
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda *_: self.settle())
            optimizer.register_step_post_hook(self._note_step)
        self._snapshot: Snapshot | None = None
        self._whole: Snapshot | None = None  # the newest that has settled
        self._copying: LateCopy | None = None
        self._may_be_late = True
        self._costs_s = deque([0.0], maxlen=3)  # of the last snapshots; the first one makes its memory, and says little
        self._snapshot_at = self._snapshot_due_at = 0.0
        self._random, self._buffers = marks.RandomMarks(), marks.BufferMarks(self._objects.values())
        self._synced = False
        tree.flatten(self._attributes(), "attributes")  # refuse at once what could not be kept
        self._mark()
        session().attach(self)

    @property
    def holds(self) -> bool:
        """Whether this process holds the job's state: it was in a sync, received it whole, or loaded a checkpoint."""
        return self._synced

    @property
    def is_dirty(self) -> bool:
        """Whether an optimizer has stepped since the last commit."""
        return self._optimizer_steps > 0

    def let_go(self) -> None:
        """What it holds counts no more, its snapshot neither: the next world starts from a checkpoint."""
        self.settle()
        self._synced = False
        self._snapshot = self._whole = None

    # ------------------------------------------------------------------------------------------- committing

    def commit(self, **values: float) -> None:
        """The end of a step: fixes step, cursor, attributes and buffers; ``values`` are tracked at this step.

        Raises:
            HostsUpdatedInterrupt: the world is about to change; ``@hvd.elastic.run`` handles it.
        """
        self.save(**values)
        self.check_host_updates()

    def save(self, **values: float) -> None:
        """`commit` without looking for changes of the world."""
        self.settle()
        taken = {name: float(value) for name, value in values.items()}
        commit = Commit(self.step, time.time(), self._drawn, taken, *self._clock.take())
        self.step += commit.steps
        for name, drawn in self._drawn.items():
            self._cursors[name] = (drawn[-1].epoch, drawn[-1].offset + 1)
        looping = bool(self._drawn)
        self._mark()
        session().committed(commit)
        self._maybe_snapshot(late=looping)
        session().consider_checkpoint(self, late=looping)

    def check_host_updates(self) -> None:
        """Leave the loop when the driver has announced a change. No collective: the others follow, see `core.job`.

        Behind an `optimizer.step` it waits for the commit: what is not committed is trained again, from the weights
        that it was trained from. So what was gathered since a commit, as gradients of micro-batches, is dropped.
        """
        if self.is_dirty or self._host_messages.empty():
            return
        self.restore()
        raise HostsUpdatedInterrupt(False)

    def _mark(self) -> None:
        self._optimizer_steps = 0
        self._drawn = {}
        self._marked_step = self.step
        self._marked_cursors = dict(self._cursors)
        self._marked_attributes = marks.copied(self._attributes())
        self._marked_random = self._random.take()
        self._buffers.take()

    def _note_step(self, *_arguments: Any) -> None:
        self._optimizer_steps += 1

    def _attributes(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}

    def _maybe_snapshot(self, *, late: bool = False) -> None:
        if self._snapshot is None or (time.monotonic() >= self._snapshot_due_at and session().memory_is_there):
            self._take_snapshot(late=late)

    def _take_snapshot(self, *, late: bool = False) -> None:
        """Into memory that outlives this process; see `elastic_spark.worker.memory`. ``late``: what only optimizers
        change may be copied when the loop has asked for its next batch."""
        self.settle()
        started = time.monotonic()
        body, tensors = self.capture()
        late = late and self._may_be_late and max(self._costs_s) > LATE_FROM_S
        self._may_be_late = True
        self._snapshot = session().keep(self.step, body, tensors, stepped(self._optimizers, tensors) if late else ())
        self._copying = self._snapshot.late
        self._snapshot_at = time.monotonic()
        self._costs_s.append(self._snapshot_at - started)
        self._plan_next()
        if self._copying is None:
            self._whole = self._snapshot

    def keep(self) -> None:
        """What was committed last outlives this process."""
        self.settle()
        if self.holds and not self.is_dirty and (self._snapshot is None or self._snapshot.step != self.step):
            self._take_snapshot()

    def settle(self) -> None:
        """No copy is under way after this."""
        if self._copying is None:
            return
        copying, self._copying = self._copying, None
        try:
            copying.settle()
            self._whole = self._snapshot
        except Torn as torn:
            print(f"elastic_spark: {torn}; the next snapshot will hold up the loop instead", flush=True)
            self._snapshot, self._may_be_late = self._whole, False
        self._costs_s[-1] += copying.seconds
        self._plan_next()

    def _plan_next(self) -> None:
        self._snapshot_due_at = self._snapshot_at + median_low(self._costs_s) / SNAPSHOT_BUDGET

    # --------------------------------------------------------------------------------- capture and putting back

    def capture(self) -> tuple[Any, dict[str, torch.Tensor]]:
        """All that survives, as ``(JSON skeleton, live tensors by name)``. Random generators are not in it."""
        whole = {name: item.state_dict() for name, item in self._objects.items()}
        skeleton, tensors = {}, {}
        for name, value in whole.items():
            skeleton[name], named = tree.flatten(value, name)
            tensors.update(named)
        attributes, named = tree.flatten(self._attributes(), "attributes")
        tensors.update(named)
        cursors = {name: list(cursor) for name, cursor in self._cursors.items()}
        body = {"step": self.step, "cursors": cursors, "objects": skeleton, "attributes": attributes}
        return body, tensors

    def put_back(self, body: Any, tensors: Mapping[str, torch.Tensor]) -> None:
        """Become what `capture` gave. Tensors are copied into the live ones by each object's ``load_state_dict``.

        Raises:
            KeyError: the state holds an object that this function does not have, or the other way round.
        """
        self.settle()
        missing = sorted(set(body["objects"]) ^ set(self._objects))
        if missing:
            raise KeyError(f"the state and the training function differ in {missing}: was the function changed?")
        for name, item in self._objects.items():
            try:
                _load(item, tree.unflatten(body["objects"][name], tensors))
            except (RuntimeError, ValueError) as error:  # torch's words for other shapes, names, groups
                raise ValueError(
                    f"the state and the training function differ in {name!r}: was the function changed? {error}"
                ) from error
        for name, value in tree.unflatten(body["attributes"], tensors).items():
            setattr(self, name, copy.deepcopy(value))
            if name not in self._names:
                self._names.append(name)
        self.step = body["step"]
        self._cursors = {name: (cursor[0], cursor[1]) for name, cursor in body["cursors"].items()}
        self._mark()

    def for_checkpoint(self, *, late: bool = False) -> tuple[Snapshot, dict[str, Any]]:
        """``(snapshot of this step, the rest)``; the caller must lease the snapshot at once. ``late``: it may be made
        while training goes on."""
        if not late:
            self.settle()
        if self._snapshot is None or self._snapshot.step != self.step:
            self._take_snapshot(late=late)
        assert self._snapshot is not None
        return self._snapshot, {"random": marks.random_as_tree()}

    def digests(self) -> tuple[bytes, dict[str, str]]:
        """SHA-256 of everything, and of each part by name: on this all ranks must agree."""
        body, tensors = self.capture()
        parts = {
            name: hashlib.sha256(tree.as_bytes(tensor).numpy().data).hexdigest() for name, tensor in tensors.items()
        }
        parts["(the rest)"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest(), parts

    # ----------------------------------------------------------------------------------- called by hvd.elastic.run

    def restore(self) -> None:
        """After a failed collective: be what the last commit was, or, when dirty, what the last snapshot was."""
        for item in self._objects.values():
            if isinstance(item, torch.optim.Optimizer):
                collective.reset_optimizer_handles(item)
                _drop_gradients(item)
        self.settle()
        if self.is_dirty and self._snapshot is not None:
            self.put_back(self._snapshot.body["state"], self._snapshot.tensors)
            return
        self._buffers.put_back()
        for name, value in marks.copied(self._marked_attributes).items():
            setattr(self, name, value)
        self.step, self._cursors = self._marked_step, dict(self._marked_cursors)
        marks.set_random_state(self._marked_random)
        self._mark()

    def sync(self) -> None:
        """Make all ranks equal to rank 0, and prove it."""
        self.settle()
        place = session().assignment()
        if place.rank == 0:
            self._bring_back(place)
        if place.rank == 0 and self.step != place.body["step"]:
            raise StateDiverged(f"rank 0 holds step {self.step}, but the job goes on from step {place.body['step']}")
        if place.rank == 0 and place.body["sole_holder"]:
            self.keep()  # until the newcomers have it, nobody else does: it must outlive this process as it is
        newcomer = not self._synced
        mine, _ = self.digests()
        if not self._agree(mine):
            mine = self._receive(place.rank, mine)
            if not self._agree(mine):
                self._name_the_difference(place.rank)
        if newcomer and place.rank != 0:
            marks.derive_random_state(place.body["seed"], place.generation, place.rank)
        self._synced = True
        self._mark()
        self._maybe_snapshot()

    def _bring_back(self, place: Assignment) -> None:
        """As rank 0 of a generation without survivors: load what the driver has chosen, once."""
        wanted = place.body["memory"] or place.body["restore"]
        if not wanted or not session().take_restore(place.generation):
            return
        if place.body["memory"]:
            found = session().load_found()
            self.put_back(found.body["state"], found.tensors)
            marks.derive_random_state(place.body["seed"], place.generation, place.rank)
        else:
            body, tensors, extra = session().load_checkpoint(place.body["restore"])
            self.put_back(body, tensors)
            marks.set_random_state(tree.unflatten(extra["random"], {}))
        self._synced = True

    def on_reset(self) -> None:
        self._drawn = {}
        self._clock.stop()
        super().on_reset()

    def _agree(self, mine: bytes) -> bool:
        """Whether all ranks hold the same, by one allgather of 32 bytes a rank."""
        words = hvd.allgather(torch.frombuffer(bytearray(mine), dtype=torch.uint8).reshape(1, -1), name="es.digest")
        return bool((words == words[0]).all())

    def _receive(self, rank: int, mine: bytes) -> bytes:
        """Become what rank 0 is; the digest of that. Who has received it whole holds it, even if rank 0 dies now."""
        body, tensors = self.capture()
        described = tree.describe(tensors)
        whole = {"body": body, "tensors": described, "digest": mine.hex()}
        header = json.dumps(whole).encode() if rank == 0 else b""
        size = hvd.broadcast(torch.tensor([len(header)]), root_rank=0, name="es.size")
        text = torch.frombuffer(bytearray(header or bytes(int(size))), dtype=torch.uint8)
        text = hvd.broadcast(text, root_rank=0, name="es.header")
        if rank != 0:
            received = json.loads(text.numpy().tobytes())
            body, described, digest = received["body"], received["tensors"], bytes.fromhex(received["digest"])
        total = tree.total_bytes(described)
        if rank == 0 and total:
            flat = torch.cat([tree.as_bytes(tensor) for tensor in tensors.values()])
        else:
            flat = torch.empty(total, dtype=torch.uint8)
        for start in range(0, total, _CHUNK):
            part = flat[start : start + _CHUNK]
            part.copy_(hvd.broadcast(part, root_rank=0, name=f"es.state.{start}"))
        if rank != 0:
            self.put_back(body, tree.carve(flat, described))
            mine, _ = self.digests()
            self._synced = self._synced or mine == digest
        return mine

    def _name_the_difference(self, rank: int) -> None:
        _, mine = self.digests()
        theirs = hvd.broadcast_object(mine, root_rank=0, name="es.parts")
        different = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise StateDiverged(
            f"after the sync, rank {rank} and rank 0 differ in {different[:5] or 'nothing that this rank can see'}: "
            "does load_state_dict of that object take over everything?"
        )

    # ------------------------------------------------------------------------------------------ for ctx.batches

    def cursor(self, dataset: str) -> tuple[int, int]:
        """``(epoch, offset)`` of the next global batch that is not committed yet."""
        return self._cursors.get(dataset, (0, 0))

    def begins(self, dataset: str) -> None:
        """An iteration begins behind the last commit: what was drawn since is drawn again."""
        self._drawn.pop(dataset, None)

    def draws(self) -> None:
        """The loop waits for its next batch."""
        if self._copying is not None:
            self._copying.start()
        self._clock.awaits_data()

    def draws_no_more(self) -> None:
        """The loop has had its last batch."""
        self.settle()
        self._clock.rests()

    def drew(self, dataset: str, batch: Batch) -> None:
        """A batch is handed to the loop: the next commit counts it as consumed."""
        self._clock.works()
        drawn = Drawn(batch.epoch, batch.offset, batch.rows, batch.row_hash)
        self._drawn.setdefault(dataset, []).append(drawn)


def _drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """What a step that did not end had gathered. (Horovod's own ``zero_grad`` refuses after a failed collective.)"""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = None


def _has_state(item: Any) -> bool:
    return callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))


def _load(item: Any, value: Any) -> None:
    """``load_state_dict`` of a copy: optimizers keep the tensors that they are given and write into them. Modules copy
    theirs by themselves, but for what `set_extra_state` gets."""
    if not isinstance(item, torch.nn.Module):
        value = copy.deepcopy(value)
    else:
        value = {name: copy.deepcopy(it) if name.endswith("_extra_state") else it for name, it in value.items()}
    item.load_state_dict(value)
