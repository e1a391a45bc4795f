"""Decides which replicas of a deployment to start and to retire next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from headrace.core.errors import ConfigError


class ReplicaPhase(StrEnum):
    STARTING = "starting"
    """The process is loading, or a gateway is not connected to it yet."""
    SERVING = "serving"
    """Every gateway has once reported the replica ready."""
    STANDBY = "standby"
    """The process has loaded, and no gateway lists it: a replica that is missing is taken from these."""
    FAILED = "failed"
    DRAINING = "draining"
    """The replica gets no new request. Its streams finish, then its process ends."""


@dataclass(slots=True)
class PlannedReplica:
    """Its name is never given to another replica.

    is_standby  until it is taken it is in no gateway's list
    was_loaded  it stood by until it was taken
    is_ready    whether every gateway reported it ready, the last time that all gateways answered
    """

    name: str
    model: str
    number: int
    revision: int
    replaces: str = ""
    phase: ReplicaPhase = ReplicaPhase.STARTING
    is_standby: bool = False
    was_loaded: bool = False
    is_ready: bool = False


@dataclass(frozen=True, slots=True)
class RolloutOptions:
    """max_surge     1: a successor serves before its predecessor leaves. 0: the predecessor ends first, for want of memory for both
    allow_outage  whether the rollout may leave no replica that serves for a time
    previous      the revision to return to when a successor cannot be started
    is_version    the new revision is another version of the model: its replicas come all or not at all
    has_canary    its first replica serves beside those before it until `passed` or `roll_back` is called
    """

    max_surge: int = 1
    allow_outage: bool = False
    previous: int = 0
    is_version: bool = False
    has_canary: bool = False


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """rollout: older revisions are being replaced; None: any revision will do"""

    num_replicas: int
    num_standby: int = 0
    revision: int = 0
    rollout: RolloutOptions | None = None

    @property
    def is_rollback(self) -> bool:
        return self.rollout is not None and self.rollout.previous == self.revision


@dataclass(frozen=True, slots=True)
class StartReplica:
    model: str
    replaces: str = ""
    is_standby: bool = False


@dataclass(frozen=True, slots=True)
class TakeStandby:
    name: str


@dataclass(frozen=True, slots=True)
class RetireReplica:
    name: str


@dataclass(frozen=True, slots=True)
class EndRollout:
    """failed  name of a successor that cannot be started
    kept    name of the model's last serving replica: the model was scaled down to it, and replacing it would be an outage
    """

    model: str
    failed: str = ""
    kept: str = ""


DeploymentAction = StartReplica | TakeStandby | RetireReplica | EndRollout


class Deployment:
    """A removed model has no target while its replicas drain."""

    def __init__(self) -> None:
        self.targets: dict[str, ModelTarget] = {}
        self.replicas: dict[str, PlannedReplica] = {}
        self._numbers: dict[str, int] = defaultdict(int)
        self._revisions: dict[str, int] = defaultdict(int)

    def copy(self) -> Deployment:
        """A copy to return to when the next plan is refused."""
        made = Deployment()
        made.targets = {**self.targets}
        made.replicas = {name: replace(replica) for name, replica in self.replicas.items()}
        made._numbers, made._revisions = self._numbers, self._revisions
        return made

    def of(self, model: str) -> list[PlannedReplica]:
        return [replica for replica in self.replicas.values() if replica.model == model]

    def listed(self, model: str) -> list[PlannedReplica]:
        return [replica for replica in self._live(model) if replica.phase in (ReplicaPhase.STARTING, ReplicaPhase.SERVING)]

    def is_converged(self, model: str) -> bool:
        """A standby need not have loaded."""
        target, replicas = self.targets.get(model), self.of(model)
        if target is None:
            return not replicas
        phases = {replica.phase for replica in replicas if not replica.is_standby}
        if target.rollout is not None or not phases <= {ReplicaPhase.SERVING, ReplicaPhase.FAILED}:
            return False
        return (len(self._live(model)), len(replicas)) == (target.num_replicas, target.num_replicas + target.num_standby)

    def _live(self, model: str) -> list[PlannedReplica]:
        return [replica for replica in self.of(model) if replica.phase is not ReplicaPhase.DRAINING and not replica.is_standby]

    def _standby(self, model: str) -> list[PlannedReplica]:
        """In the order in which they are taken."""
        phases = [ReplicaPhase.STANDBY, ReplicaPhase.STARTING, ReplicaPhase.FAILED]
        standby = [replica for replica in self.of(model) if replica.is_standby and replica.phase in phases]
        return sorted(standby, key=lambda replica: (phases.index(replica.phase), replica.number))

    def starting(self, model: str) -> list[str]:
        return [replica.name for replica in self.of(model) if replica.phase is ReplicaPhase.STARTING]

    def only_waits_for_starts(self, model: str) -> bool:
        phases = {replica.phase for replica in self.of(model)}
        return ReplicaPhase.STARTING in phases and ReplicaPhase.DRAINING not in phases

    # -- commands ------------------------------------------------------------------------------------------------------------------

    def scale(self, counts: Mapping[str, int], standby: Mapping[str, int] | None = None) -> None:
        """The models of `counts`, and no other. standby: None: as many as before"""
        for model in [*self.targets]:
            if model not in counts:
                del self.targets[model]
        for model, count in counts.items():
            known = self.targets.get(model) or ModelTarget(count, revision=self._next_revision(model))
            num_standby = known.num_standby if standby is None else standby.get(model, 0)
            self.targets[model] = replace(known, num_replicas=count, num_standby=num_standby)

    def scale_model(self, model: str, count: int) -> None:
        self.targets[model] = replace(self.targets[model], num_replicas=count)

    def roll_out(self, model: str, options: RolloutOptions) -> int:
        """Returns the new revision. Raises ConfigError where the first step would leave no replica that serves, unless `options` allow
        that."""
        self.drop_failed(model)
        target, replicas = self.targets[model], [*self._live(model), *self._standby(model)]
        if options.max_surge == 0 and not options.allow_outage and self._live(model) and target.num_replicas < 2:
            reason = f"would leave no replica of {model} while its only one is replaced"
            raise ConfigError("--max-surge 0", reason, "Use --max-surge 1 if memory allows two copies, or say --allow-outage.")
        rollout = replace(options, previous=self.previous_revision(model), has_canary=options.is_version) if replicas else None
        self.targets[model] = target = replace(target, revision=self._next_revision(model), rollout=rollout)
        return target.revision

    def previous_revision(self, model: str) -> int:
        """The one that serves, and that a rollout returns to."""
        target = self.targets[model]
        return target.revision if target.rollout is None else target.rollout.previous

    def canary(self, model: str) -> PlannedReplica | None:
        """The replica of another version that waits to be judged, once it has served."""
        target = self.targets.get(model)
        if target is None or target.rollout is None or not target.rollout.has_canary:
            return None
        return next((each for each in self.of(model) if each.revision == target.revision and each.phase is ReplicaPhase.SERVING), None)

    def passed(self, model: str) -> None:
        """The canary's version replaces the other replicas."""
        target = self.targets[model]
        assert target.rollout is not None
        self.targets[model] = replace(target, rollout=replace(target.rollout, has_canary=False))

    def roll_back(self, model: str) -> None:
        """Replicas of the earlier revision replace those of the new one."""
        target = self.targets[model]
        assert target.rollout is not None
        rollout = replace(target.rollout, is_version=False, has_canary=False)
        self.targets[model] = replace(target, revision=rollout.previous, rollout=rollout)

    def drop_failed(self, model: str) -> list[str]:
        """Forget the replicas that could not be started, so that others are started in their place."""
        failed = [replica.name for replica in self.of(model) if replica.phase is ReplicaPhase.FAILED]
        for name in failed:
            del self.replicas[name]
        return failed

    def drain(self, name: str, *, allow_outage: bool = False) -> None:
        """Raises ConfigError for the model's last serving replica, unless `allow_outage`."""
        replica = self.replicas.get(name)
        if replica is None or replica.phase is ReplicaPhase.DRAINING:
            return  # the replica leaves, or has left meanwhile
        if replica.phase is ReplicaPhase.SERVING and not allow_outage and not self._serving_beside(replica):
            reason = f"is the last replica of {replica.model} that serves"
            raise ConfigError(name, reason, f"Add one first (headrace scale {replica.model}=2), or say --allow-outage.")
        target, num_live = self.targets.get(replica.model), len(self._live(replica.model))
        if target is not None and not replica.is_standby and num_live <= target.num_replicas:  # else a rollout has one more
            self.targets[replica.model] = replace(target, num_replicas=max(0, target.num_replicas - 1))
        self.retire(name)

    # -- what to do, and that it was done ------------------------------------------------------------------------------------------

    def actions(self) -> list[DeploymentAction]:
        """The actions to take now; none while a process or a gateway must be waited for."""
        models = dict.fromkeys([*self.targets, *(replica.model for replica in self.replicas.values())])
        return [action for model in models for action in self._actions(model)]

    def is_rolling(self, model: str) -> bool:
        """Whether its replicas are being replaced now: of several rollouts the others wait."""
        return next((name for name, target in self.targets.items() if target.rollout is not None), None) == model

    def _waits(self, model: str) -> bool:
        return self.targets[model].rollout is not None and not self.is_rolling(model)

    def start(self, action: StartReplica) -> PlannedReplica:
        prefix = replica_prefix(action.model)
        number = self._numbers[prefix]
        self._numbers[prefix] += 1
        revision = self._revision_to_start(action.model)
        made = PlannedReplica(f"{prefix}-{number}", action.model, number, revision, action.replaces, is_standby=action.is_standby)
        self.replicas[made.name] = made
        return made

    def take(self, name: str) -> None:
        """A standby gets into the gateways' list."""
        replica = self.replicas[name]
        replica.is_standby = False
        if replica.phase is ReplicaPhase.STANDBY:
            replica.phase, replica.was_loaded = ReplicaPhase.STARTING, True

    def retire(self, name: str) -> None:
        self.replicas[name].phase = ReplicaPhase.DRAINING
        self.replicas[name].is_ready = False

    def end_rollout(self, action: EndRollout) -> None:
        """If a successor failed, it is forgotten: replicas still missing are started with the earlier revision. A rollback follows where
        others of another version serve already.
        """
        target = self.targets[action.model]
        assert target.rollout is not None
        if action.failed:
            del self.replicas[action.failed]
            if target.rollout.is_version and any(each.revision == target.revision for each in self.of(action.model)):
                self.roll_back(action.model)
                return
        if action.failed or (action.kept and target.rollout.is_version):
            target = replace(target, revision=target.rollout.previous)
        self.targets[action.model] = replace(target, rollout=None)

    # -- events of processes -------------------------------------------------------------------------------------------------------

    def loaded(self, name: str) -> None:
        """A standby's process."""
        self.replicas[name].phase = ReplicaPhase.STANDBY

    def seen(self, name: str, *, is_ready: bool) -> None:
        replica = self.replicas[name]
        assert not replica.is_standby, "no gateway lists it"
        if replica.phase not in (ReplicaPhase.STARTING, ReplicaPhase.SERVING):
            return
        replica.is_ready = is_ready
        if is_ready:
            replica.phase, replica.replaces = ReplicaPhase.SERVING, ""

    def failed(self, name: str) -> None:
        self.replicas[name].phase, self.replicas[name].is_ready = ReplicaPhase.FAILED, False

    def started_after_all(self, name: str) -> None:
        if self.replicas[name].phase is ReplicaPhase.FAILED:
            self.replicas[name].phase = ReplicaPhase.STARTING

    def ended(self, name: str) -> None:
        del self.replicas[name]

    # -- the rules -----------------------------------------------------------------------------------------------------------------

    def _actions(self, model: str) -> Iterator[DeploymentAction]:
        target, replicas = self.targets.get(model), self.of(model)
        live, standby = self._live(model), self._standby(model)
        if target is None:
            yield from (RetireReplica(replica.name) for replica in (*live, *standby))
        elif target.rollout is None:
            yield from self._filled(model, target, live, standby)
        elif self._waits(model):
            free = target.num_replicas + target.rollout.max_surge - len(replicas)
            yield from [StartReplica(model)] * min(target.num_replicas - len(live), free)
        else:
            yield from (RetireReplica(replica.name) for replica in standby)  # of an older revision; their memory is for the successors
            yield from self._rollout(model, target, target.rollout, live, num_processes=len(replicas))

    def _filled(
        self, model: str, target: ModelTarget, live: list[PlannedReplica], standby: list[PlannedReplica]
    ) -> Iterator[DeploymentAction]:
        num_missing = target.num_replicas - len(live)
        num_taken = min(max(0, num_missing), len(standby))
        yield from (TakeStandby(replica.name) for replica in standby[:num_taken])
        yield from [StartReplica(model)] * (num_missing - num_taken)
        yield from _retired(live, -num_missing)
        yield from [StartReplica(model, is_standby=True)] * (target.num_standby - len(standby) + num_taken)
        yield from (RetireReplica(replica.name) for replica in standby[num_taken + target.num_standby :])

    def _rollout(
        self, model: str, target: ModelTarget, options: RolloutOptions, live: list[PlannedReplica], *, num_processes: int
    ) -> Iterator[DeploymentAction]:
        """At most num_replicas + max_surge processes exist, draining ones included, and at most one replica is being replaced."""
        current = [replica for replica in live if replica.revision == target.revision]
        old = [replica for replica in live if replica.revision != target.revision]
        if failed := [replica.name for replica in current if replica.phase is ReplicaPhase.FAILED]:
            yield EndRollout(model, failed[0])
            return
        free = target.num_replicas + options.max_surge - num_processes
        missing = target.num_replicas - len(live)
        kept = options.max_surge if options.has_canary else 0
        if target.is_rollback and missing < 0 and not any(replica.replaces for replica in current) and old:
            yield from (RetireReplica(replica.name) for replica in [_first_to_retire(old, options.previous)] if self._may_leave(replica))
        elif missing < -options.max_surge:  # the model was scaled down during the rollout
            chosen = _retired(live, -missing - kept, first=old)
            may_leave_none = options.allow_outage or target.num_replicas == 0
            yield from chosen if may_leave_none else _without_the_last_ready(chosen, live)
        elif missing > 0:
            yield from [StartReplica(model)] * min(missing, free)
        elif any(replica.phase is ReplicaPhase.STARTING for replica in current) or (current and options.has_canary):
            return
        elif old:
            yield from self._replace_one(target, options, old, current, has_surge=missing < 0, can_start=free > 0)
        elif missing < 0:
            yield from _retired(live, -missing)
        elif num_processes == len(live):
            yield EndRollout(model)

    def _replace_one(
        self,
        target: ModelTarget,
        options: RolloutOptions,
        old: list[PlannedReplica],
        current: list[PlannedReplica],
        *,
        has_surge: bool,
        can_start: bool,
    ) -> Iterator[DeploymentAction]:
        victim = _first_to_retire(old, options.previous)
        if has_surge:
            if all(replica.is_ready for replica in current):
                yield RetireReplica(victim.name)
        elif options.max_surge:
            if can_start:
                yield StartReplica(victim.model, replaces=victim.name)
        elif options.allow_outage or self._may_leave(victim):
            yield RetireReplica(victim.name)
        elif target.num_replicas < 2:
            yield EndRollout(victim.model, kept=victim.name)

    def _may_leave(self, victim: PlannedReplica) -> bool:
        return victim.phase is not ReplicaPhase.SERVING or self._serving_beside(victim)

    def _revision_to_start(self, model: str) -> int:
        """One canary is enough: what is missing beside it comes back as it was, and so does what is missing before the rollout's turn."""
        target = self.targets[model]
        if target.rollout is not None and self._waits(model):
            return target.rollout.previous
        if target.rollout is None or not target.rollout.has_canary:
            return target.revision
        has_one = any(each.revision == target.revision and each.phase is not ReplicaPhase.DRAINING for each in self.of(model))
        return target.rollout.previous if has_one else target.revision

    def _next_revision(self, model: str) -> int:
        self._revisions[model] += 1
        return self._revisions[model] - 1

    def _serving_beside(self, replica: PlannedReplica) -> bool:
        return any(other.is_ready and other.name != replica.name for other in self.of(replica.model))

    def check(self) -> None:
        for name, replica in self.replicas.items():
            assert name == replica.name
            assert replica.number < self._numbers[replica_prefix(replica.model)], "a name could be given again"
            assert not replica.is_ready or replica.phase is ReplicaPhase.SERVING
            assert not replica.is_standby or replica.phase is not ReplicaPhase.SERVING
            assert replica.is_standby or replica.phase is not ReplicaPhase.STANDBY
        for model, target in self.targets.items():
            assert min(target.num_replicas, target.num_standby) >= 0
            assert target.revision < self._revisions[model]


def _retired(live: Iterable[PlannedReplica], count: int, *, first: Iterable[PlannedReplica] = ()) -> Iterator[RetireReplica]:
    preferred = {replica.name for replica in first}
    ordered = sorted(live, key=lambda replica: (replica.name not in preferred, *_rank(replica), -replica.number))
    yield from (RetireReplica(replica.name) for replica in ordered[: max(0, count)])


def _without_the_last_ready(chosen: Iterable[RetireReplica], live: Iterable[PlannedReplica]) -> Iterator[RetireReplica]:
    """`chosen`, except an action that would leave no ready replica in `live`: that replica stays until its successor serves."""
    ready = {replica.name for replica in live if replica.is_ready}
    for action in chosen:
        if ready != {action.name}:
            ready.discard(action.name)
            yield action


def _first_to_retire(replicas: Iterable[PlannedReplica], previous: int) -> PlannedReplica:
    """Among equals, one of a rollout that was not completed."""
    return min(replicas, key=lambda replica: (*_rank(replica), replica.revision <= previous, replica.number))


def _rank(replica: PlannedReplica) -> tuple[bool, bool, bool]:
    return replica.phase is ReplicaPhase.SERVING, replica.phase is ReplicaPhase.STARTING, replica.is_ready


def replica_prefix(model: str) -> str:
    """The part of a replica's name before "-" and its number: the model's name in characters that file names and metrics allow."""
    return "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in model)[:100]
