"""Tests which replicas a deployment starts and retires: each command, and random commands and faults that must end as desired."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from headrace.core.errors import ConfigError
from headrace.policy.deployment import (
    Deployment,
    DeploymentAction,
    EndRollout,
    PlannedReplica,
    ReplicaPhase,
    RetireReplica,
    RolloutOptions,
    StartReplica,
    TakeStandby,
)

pytestmark = pytest.mark.pure


def run(deployment: Deployment) -> list[DeploymentAction]:
    """Do what is to be done now; all of it."""
    done: list[DeploymentAction] = []
    while actions := deployment.actions():
        for action in actions:
            match action:
                case StartReplica():
                    deployment.start(action)
                case TakeStandby():
                    deployment.take(action.name)
                case RetireReplica():
                    deployment.retire(action.name)
                case EndRollout():
                    deployment.end_rollout(action)
        done += actions
        assert len(done) < 1000, "actions without end"
    return done


def phases(deployment: Deployment) -> dict[str, str]:
    return {name: str(replica.phase) for name, replica in deployment.replicas.items()}


def serve(deployment: Deployment, *names: str) -> None:
    for name in names or [*deployment.replicas]:
        if deployment.replicas[name].is_standby:
            deployment.loaded(name)
        else:
            deployment.seen(name, is_ready=True)


@pytest.fixture
def pair() -> Deployment:
    """One model, two replicas, both serving."""
    deployment = Deployment()
    deployment.scale({"tiny": 2})
    run(deployment)
    serve(deployment)
    return deployment


def test_a_rollout_starts_one_successor_and_retires_one_replica_at_a_time(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions())
    assert run(pair) == [StartReplica("tiny", replaces="tiny-0")]
    serve(pair, "tiny-2")
    assert run(pair) == [RetireReplica("tiny-0")], "the next successor waits until this one has left: at most one process more"
    pair.ended("tiny-0")
    assert run(pair) == [StartReplica("tiny", replaces="tiny-1")]
    serve(pair, "tiny-3")
    assert run(pair) == [RetireReplica("tiny-1")]
    assert not pair.is_converged("tiny")
    pair.ended("tiny-1")
    assert run(pair) == [EndRollout("tiny")]
    assert pair.is_converged("tiny")


def test_without_surge_the_old_one_ends_first_while_the_other_serves(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions(max_surge=0))
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.ended("tiny-0")
    assert run(pair) == [StartReplica("tiny")]
    pair.seen("tiny-1", is_ready=False)
    serve(pair, "tiny-2")
    assert run(pair) == [RetireReplica("tiny-1")], "it does not serve, and may leave"


def test_without_surge_the_only_ready_replica_is_kept(pair: Deployment) -> None:
    pair.seen("tiny-0", is_ready=False)
    pair.roll_out("tiny", RolloutOptions(max_surge=0))
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.ended("tiny-0")
    run(pair)
    serve(pair, "tiny-2")
    pair.seen("tiny-2", is_ready=False)
    assert run(pair) == []
    pair.seen("tiny-1", is_ready=False)
    assert run(pair) == [], "what has served may serve again: a gateway may be slow"
    pair.seen("tiny-1", is_ready=True)
    pair.seen("tiny-2", is_ready=True)
    assert run(pair) == [RetireReplica("tiny-1")]


def test_without_surge_an_only_replica_is_refused_by_name_unless_an_outage_is_allowed() -> None:
    deployment = Deployment()
    deployment.scale({"tiny": 1})
    run(deployment)
    serve(deployment)
    with pytest.raises(ConfigError, match=r"--max-surge 0: would leave no replica of tiny.*--allow-outage"):
        deployment.roll_out("tiny", RolloutOptions(max_surge=0))
    assert run(deployment) == []
    deployment.roll_out("tiny", RolloutOptions(max_surge=0, allow_outage=True))
    assert run(deployment) == [RetireReplica("tiny-0")]


def test_a_successor_that_cannot_start_ends_the_rollout_and_the_old_ones_serve_on(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions())
    run(pair)
    pair.failed("tiny-2")
    assert run(pair) == [EndRollout("tiny", failed="tiny-2")]
    assert phases(pair) == {"tiny-0": "serving", "tiny-1": "serving"}
    assert pair.is_converged("tiny")


def test_after_a_failed_rollout_without_surge_the_earlier_revision_comes_back(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions(max_surge=0))
    run(pair)
    pair.ended("tiny-0")
    run(pair)
    pair.failed("tiny-2")
    assert run(pair) == [EndRollout("tiny", failed="tiny-2"), StartReplica("tiny")]
    assert (pair.replicas["tiny-3"].revision, pair.replicas["tiny-1"].revision) == (0, 0)


def test_a_model_that_is_removed_drains_and_its_names_are_not_given_again(pair: Deployment) -> None:
    pair.scale({"other": 1})
    assert run(pair) == [StartReplica("other"), RetireReplica("tiny-0"), RetireReplica("tiny-1")]
    pair.scale({"tiny": 1})
    run(pair)
    assert [name for name in pair.replicas if name.startswith("tiny")] == ["tiny-0", "tiny-1", "tiny-2"]


def test_a_copy_to_return_to_counts_names_and_revisions_on(pair: Deployment) -> None:
    before = pair.copy()
    pair.roll_out("tiny", RolloutOptions())
    run(pair)
    assert phases(before) == {"tiny-0": "serving", "tiny-1": "serving"}
    assert before.roll_out("tiny", RolloutOptions()) == 2
    run(before)
    assert [*before.replicas] == ["tiny-0", "tiny-1", "tiny-3"]


def test_models_that_share_a_prefix_share_its_numbers() -> None:
    deployment = Deployment()
    deployment.scale({"a/b": 1, "a-b": 1})
    run(deployment)
    assert [*deployment.replicas] == ["a-b-0", "a-b-1"]


def test_fewer_replicas_keep_the_ones_that_serve(pair: Deployment) -> None:
    pair.scale({"tiny": 4})
    run(pair)
    pair.failed("tiny-2")
    pair.seen("tiny-0", is_ready=False)
    pair.scale({"tiny": 1})
    assert run(pair) == [RetireReplica("tiny-2"), RetireReplica("tiny-3"), RetireReplica("tiny-0")]


def test_the_last_replica_that_serves_is_drained_only_where_that_is_allowed(pair: Deployment) -> None:
    pair.drain("tiny-0")
    with pytest.raises(ConfigError, match="tiny-1: is the last replica of tiny that serves"):
        pair.drain("tiny-1")
    assert run(pair) == [], "the model does with one less"
    pair.seen("tiny-1", is_ready=False)
    with pytest.raises(ConfigError, match="tiny-1: is the last replica of tiny that serves"):
        pair.drain("tiny-1")
    pair.drain("tiny-1", allow_outage=True)
    assert pair.targets["tiny"].num_replicas == 0


def test_what_failed_is_replaced_by_a_rollout_at_once() -> None:
    deployment = Deployment()
    deployment.scale({"tiny": 2})
    run(deployment)
    for name in ("tiny-0", "tiny-1"):
        deployment.failed(name)
    assert deployment.is_converged("tiny")
    deployment.roll_out("tiny", RolloutOptions())
    assert run(deployment) == [StartReplica("tiny"), StartReplica("tiny")]


def test_scaling_down_during_a_rollout_keeps_the_replica_that_serves_until_its_successor_does(pair: Deployment) -> None:
    pair.seen("tiny-1", is_ready=False)
    pair.roll_out("tiny", RolloutOptions())
    assert run(pair) == [StartReplica("tiny", replaces="tiny-1")]
    pair.scale({"tiny": 1})
    assert run(pair) == [RetireReplica("tiny-1")], "tiny-0 alone is ready, tiny-2 starts"
    pair.ended("tiny-1")
    serve(pair, "tiny-2")
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.ended("tiny-0")
    assert run(pair) == [EndRollout("tiny")]


def test_a_rollout_without_surge_ends_when_the_model_is_scaled_down_to_the_replica_that_serves(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions(max_surge=0))
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.scale({"tiny": 1})
    assert run(pair) == [EndRollout("tiny", kept="tiny-1")]
    pair.ended("tiny-0")
    assert pair.is_converged("tiny")
    pair.scale({"tiny": 2})
    assert run(pair) == [StartReplica("tiny")]
    assert pair.replicas["tiny-2"].revision > pair.replicas["tiny-1"].revision, "what starts next has the new options"


def test_a_standby_takes_the_place_of_a_start_and_another_one_is_started(pair: Deployment) -> None:
    pair.scale({"tiny": 2}, {"tiny": 1})
    assert run(pair) == [StartReplica("tiny", is_standby=True)]
    assert pair.is_converged("tiny"), "nothing waits for a standby"
    pair.loaded("tiny-2")
    assert [replica.name for replica in pair.listed("tiny")] == ["tiny-0", "tiny-1"]
    pair.scale_model("tiny", 3)
    assert run(pair) == [TakeStandby("tiny-2"), StartReplica("tiny", is_standby=True)]
    assert phases(pair) == {"tiny-0": "serving", "tiny-1": "serving", "tiny-2": "starting", "tiny-3": "starting"}
    pair.scale_model("tiny", 5)
    assert run(pair) == [TakeStandby("tiny-3"), StartReplica("tiny"), StartReplica("tiny", is_standby=True)], "one that loads is ahead"
    pair.scale({"tiny": 2}, {"tiny": 0})
    assert [action.name for action in run(pair) if isinstance(action, RetireReplica)] == ["tiny-4", "tiny-3", "tiny-2", "tiny-5"]


def test_a_rollout_replaces_a_standby_too_once_the_others_are_replaced(pair: Deployment) -> None:
    pair.scale({"tiny": 1}, {"tiny": 1})
    assert run(pair) == [RetireReplica("tiny-1"), StartReplica("tiny", is_standby=True)]
    pair.ended("tiny-1")
    pair.loaded("tiny-2")
    pair.roll_out("tiny", RolloutOptions())
    assert run(pair) == [RetireReplica("tiny-2")], "its memory is for the successor"
    pair.ended("tiny-2")
    assert run(pair) == [StartReplica("tiny", replaces="tiny-0")]
    serve(pair, "tiny-3")
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.ended("tiny-0")
    assert run(pair) == [EndRollout("tiny"), StartReplica("tiny", is_standby=True)]
    assert pair.replicas["tiny-4"].revision == pair.replicas["tiny-3"].revision == 1


def test_a_standby_that_is_drained_is_replaced_and_takes_nothing_from_the_model(pair: Deployment) -> None:
    pair.scale({"tiny": 2}, {"tiny": 1})
    run(pair)
    pair.drain("tiny-2")
    assert pair.targets["tiny"].num_replicas == 2
    assert run(pair) == [StartReplica("tiny", is_standby=True)]


def revisions(deployment: Deployment) -> dict[str, int]:
    return {name: replica.revision for name, replica in deployment.replicas.items()}


@pytest.fixture
def canary(pair: Deployment) -> Deployment:
    """Another version's first replica serves beside the pair, and has not been judged."""
    pair.roll_out("tiny", RolloutOptions(is_version=True))
    assert run(pair) == [StartReplica("tiny", replaces="tiny-0")]
    assert pair.canary("tiny") is None, "it loads"
    serve(pair, "tiny-2")
    return pair


def test_another_version_waits_at_its_first_replica_and_goes_on_once_that_has_passed(canary: Deployment) -> None:
    found = canary.canary("tiny")
    assert found is not None
    assert (found.name, run(canary)) == ("tiny-2", [])
    canary.passed("tiny")
    assert run(canary) == [RetireReplica("tiny-0")]


def test_a_rollback_retires_the_canary_at_once_and_nothing_else(canary: Deployment) -> None:
    canary.seen("tiny-1", is_ready=False)
    canary.roll_back("tiny")
    assert run(canary) == [RetireReplica("tiny-2")], "tiny-0 serves beside it; tiny-1 is not waited for"
    canary.ended("tiny-2")
    assert run(canary) == [EndRollout("tiny")]
    canary.scale({"tiny": 3})
    run(canary)
    assert revisions(canary) == {"tiny-0": 0, "tiny-1": 0, "tiny-3": 0}


def test_a_rollback_keeps_the_canary_while_it_alone_serves(canary: Deployment) -> None:
    for name in ("tiny-0", "tiny-1"):
        canary.seen(name, is_ready=False)
    canary.roll_back("tiny")
    assert run(canary) == []
    canary.seen("tiny-0", is_ready=True)
    assert run(canary) == [RetireReplica("tiny-2")]


def test_beside_a_canary_what_is_missing_comes_back_as_it_was(canary: Deployment) -> None:
    canary.drain("tiny-0")
    canary.scale({"tiny": 3})
    assert run(canary) == [StartReplica("tiny")] * 1
    assert revisions(canary) == {"tiny-0": 0, "tiny-1": 0, "tiny-2": 1, "tiny-3": 0}
    canary.scale({"tiny": 1})
    assert run(canary) == [RetireReplica("tiny-3")], "one stays to compare the canary with"


def test_a_canary_without_surge_takes_the_place_of_one_that_comes_back(pair: Deployment) -> None:
    pair.roll_out("tiny", RolloutOptions(max_surge=0, is_version=True))
    assert run(pair) == [RetireReplica("tiny-0")]
    pair.ended("tiny-0")
    run(pair)
    serve(pair, "tiny-2")
    pair.roll_back("tiny")
    assert run(pair) == [RetireReplica("tiny-2")]
    pair.ended("tiny-2")
    assert run(pair) == [StartReplica("tiny")]
    serve(pair, "tiny-3")
    assert run(pair) == [EndRollout("tiny")]
    assert revisions(pair) == {"tiny-1": 0, "tiny-3": 0}


def test_a_later_replica_of_another_version_that_cannot_start_takes_back_those_before_it(canary: Deployment) -> None:
    canary.passed("tiny")
    run(canary)
    canary.ended("tiny-0")
    assert run(canary) == [StartReplica("tiny", replaces="tiny-1")]
    canary.failed("tiny-3")
    assert run(canary)[0] == EndRollout("tiny", failed="tiny-3")
    assert run(canary) == []
    serve(canary, "tiny-4")
    assert run(canary) == [RetireReplica("tiny-2")]
    canary.ended("tiny-2")
    run(canary)
    assert revisions(canary) == {"tiny-1": 0, "tiny-4": 0}
    assert canary.is_converged("tiny")


def test_a_rollout_over_a_rollout_returns_to_what_served_before_both(canary: Deployment) -> None:
    canary.roll_out("tiny", RolloutOptions(is_version=True))
    assert run(canary) == [RetireReplica("tiny-2")], "the earlier canary makes room for the next one"
    canary.ended("tiny-2")
    run(canary)
    serve(canary, "tiny-3")
    canary.roll_back("tiny")
    assert (run(canary), canary.targets["tiny"].revision) == ([RetireReplica("tiny-3")], 0)


@pytest.fixture
def lone_canary() -> Deployment:
    """Beside the only replica."""
    deployment = Deployment()
    deployment.scale({"tiny": 1})
    run(deployment)
    serve(deployment)
    deployment.roll_out("tiny", RolloutOptions(is_version=True))
    run(deployment)
    serve(deployment, "tiny-1")
    return deployment


@pytest.mark.parametrize(("drained", "stays"), [("tiny-1", "tiny-0"), ("tiny-0", "tiny-1")])
def test_one_of_two_that_a_rollout_has_is_drained_and_the_model_keeps_its_replica(
    lone_canary: Deployment, drained: str, stays: str
) -> None:
    lone_canary.drain(drained)
    assert run(lone_canary) == []
    assert (lone_canary.targets["tiny"].num_replicas, [each.name for each in lone_canary.listed("tiny")]) == (1, [stays])
    lone_canary.ended(drained)
    if lone_canary.canary("tiny") is None:
        assert run(lone_canary) == [StartReplica("tiny", replaces="tiny-0")], "another canary"
        serve(lone_canary, "tiny-2")
    lone_canary.passed("tiny")
    run(lone_canary)
    if drained == "tiny-1":
        lone_canary.ended("tiny-0")
        run(lone_canary)
    assert lone_canary.is_converged("tiny")


@pytest.mark.parametrize("max_surge", [0, 1])
def test_a_model_whose_rollout_waits_for_another_gets_what_it_lacks_as_it_was(pair: Deployment, max_surge: int) -> None:
    pair.scale({"tiny": 2, "other": 2})
    run(pair)
    serve(pair)
    for model in ("tiny", "other"):
        pair.roll_out(model, RolloutOptions(max_surge, is_version=True))
    run(pair)
    assert (pair.is_rolling("tiny"), pair.is_rolling("other")) == (True, False)
    pair.drain("other-0")
    pair.scale_model("other", 2)
    started = run(pair)
    pair.ended("other-0")
    assert started + run(pair) == [StartReplica("other")]
    assert revisions(pair)["other-2"] == 0
    pair.scale_model("other", 3)
    assert run(pair) == [StartReplica("other")]


MODELS = ("a", "b")


class DeploymentMachine(RuleBasedStateMachine):
    """Commands and faults in any order. After each of them everything is done that is to be done, under the rules of docs/control.md."""

    def __init__(self) -> None:
        super().__init__()
        self.deployment = Deployment()
        self.counts: dict[str, int] = {}
        self.standby: dict[str, int] = {}
        self.names: set[str] = set()
        self.versions: dict[tuple[str, int], int] = {}
        self.num_versions = 0
        self.has_failed_start = False

    def do_all(self) -> None:
        for _ in range(100):
            actions = self.deployment.actions()
            if not actions:
                break
            for action in actions:
                self.do(action)
        assert not self.deployment.actions()
        self.deployment.check()
        for model, target in self.deployment.targets.items():
            self.versions.setdefault((model, target.revision), self.num_versions)
            if target.rollout is not None and target.rollout.has_canary:
                unjudged = [each for each in self.processes(model) if each.revision == target.revision]
                assert sum(each.phase is not ReplicaPhase.DRAINING for each in unjudged) <= 1, "one canary, until it is judged"

    def do(self, action: DeploymentAction) -> None:
        match action:
            case StartReplica():
                target, processes = self.deployment.targets[action.model], self.processes(action.model)
                if target.rollout is not None:
                    assert len(processes) < target.num_replicas + target.rollout.max_surge
                made = self.deployment.start(action)
                assert made.name not in self.names, "a name is given once"
                self.names.add(made.name)
            case TakeStandby():
                taken = self.deployment.replicas[action.name]
                assert taken.is_standby
                assert taken.revision == self.deployment.targets[taken.model].revision
                self.deployment.take(action.name)
            case RetireReplica():
                victim = self.deployment.replicas[action.name]
                target_or_none = self.deployment.targets.get(victim.model)
                rollout = target_or_none.rollout if target_or_none is not None else None
                others = [each for each in self.processes(victim.model) if each.is_ready and each is not victim]
                should_be_any = target_or_none is not None and target_or_none.num_replicas > 0
                if rollout is not None and victim.is_ready and not rollout.allow_outage and should_be_any:
                    assert others, "a rollout never takes the last one that serves"
                self.deployment.retire(action.name)
                if victim.phase is ReplicaPhase.FAILED:
                    self.deployment.ended(action.name)
            case EndRollout():
                self.deployment.end_rollout(action)

    def processes(self, model: str) -> list[PlannedReplica]:
        return [replica for replica in self.deployment.of(model) if replica.phase is not ReplicaPhase.FAILED]

    def pick(self, data: st.DataObject, *among: ReplicaPhase) -> str | None:
        names = [name for name, replica in self.deployment.replicas.items() if replica.phase in among]
        return data.draw(st.sampled_from(names)) if names else None

    @rule(model=st.sampled_from(MODELS), count=st.integers(0, 3), standby=st.integers(0, 2))
    def scale(self, model: str, count: int, standby: int) -> None:
        """0: the model is removed."""
        self.counts = {name: number for name, number in {**self.counts, model: count}.items() if number}
        self.standby = {**self.standby, model: standby}
        self.deployment.scale(self.counts, self.standby)
        self.do_all()

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), count=st.integers(0, 3))
    def scale_by_load(self, data: st.DataObject, count: int) -> None:
        """0: the model stays, without a replica."""
        model = data.draw(st.sampled_from(sorted(self.counts)))
        self.counts[model] = count
        self.deployment.scale_model(model, count)
        self.do_all()

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), max_surge=st.integers(0, 1), allow_outage=st.booleans())
    def roll_out(self, data: st.DataObject, max_surge: int, allow_outage: bool) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts)))
        try:
            self.deployment.roll_out(model, RolloutOptions(max_surge, allow_outage))
        except ConfigError:
            assert not allow_outage
            assert max_surge == 0
        self.do_all()

    @precondition(lambda self: self.counts)
    @rule(data=st.data(), max_surge=st.integers(0, 1))
    def roll_out_a_version(self, data: st.DataObject, max_surge: int) -> None:
        model = data.draw(st.sampled_from(sorted(self.counts)))
        self.num_versions += 1
        self.deployment.roll_out(model, RolloutOptions(max_surge, allow_outage=max_surge == 0, is_version=True))
        self.do_all()

    @rule(data=st.data(), is_good=st.booleans())
    def judge(self, data: st.DataObject, is_good: bool) -> None:
        if canaries := [model for model in MODELS if self.deployment.canary(model)]:
            model = data.draw(st.sampled_from(canaries))
            self.deployment.passed(model) if is_good else self.deployment.roll_back(model)
            self.do_all()

    @rule(data=st.data())
    def becomes_ready(self, data: st.DataObject) -> None:
        if name := self.pick(data, ReplicaPhase.STARTING, ReplicaPhase.SERVING):
            serve(self.deployment, name)
            self.do_all()

    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        if name := self.pick(data, ReplicaPhase.SERVING):
            self.deployment.seen(name, is_ready=False)
            self.do_all()

    @rule(data=st.data())
    def cannot_start(self, data: st.DataObject) -> None:
        if name := self.pick(data, ReplicaPhase.STARTING):
            self.deployment.failed(name)
            self.has_failed_start = True
            self.do_all()

    @rule(data=st.data())
    def starts_after_all(self, data: st.DataObject) -> None:
        if name := self.pick(data, ReplicaPhase.FAILED):
            self.deployment.started_after_all(name)
            self.do_all()

    @rule(data=st.data())
    def has_drained(self, data: st.DataObject) -> None:
        if name := self.pick(data, ReplicaPhase.DRAINING):
            self.deployment.ended(name)
            self.do_all()

    @rule(data=st.data(), allow_outage=st.booleans())
    def drain(self, data: st.DataObject, allow_outage: bool) -> None:
        if name := self.pick(data, ReplicaPhase.SERVING, ReplicaPhase.STANDBY):
            model = self.deployment.replicas[name].model
            num_live = len(self.deployment._live(model))
            try:
                self.deployment.drain(name, allow_outage=allow_outage)
            except ConfigError:
                assert not allow_outage
            else:
                if model in self.counts:
                    assert num_live <= self.counts[model] or self.deployment.targets[model].num_replicas == self.counts[model]
                    self.counts[model] = self.deployment.targets[model].num_replicas
            self.do_all()

    def teardown(self) -> None:
        """When every process comes up and every drain ends, each model has what it should have, and nothing else is there."""
        for _ in range(200):
            self.do_all()
            for name, replica in [*self.deployment.replicas.items()]:
                if replica.phase is ReplicaPhase.DRAINING:
                    self.deployment.ended(name)
                else:
                    self.deployment.started_after_all(name)
                    serve(self.deployment, name)
            for model in MODELS:
                if self.deployment.canary(model):
                    self.deployment.passed(model)
            if not self.deployment.actions() and all(self.deployment.is_converged(model) for model in MODELS):
                break
        found = {model: len(self.deployment.listed(model)) for model in MODELS}
        assert found == {model: self.counts.get(model, 0) for model in MODELS}
        standby = {model: len(self.deployment.of(model)) - found[model] for model in MODELS}
        assert standby == {model: self.standby.get(model, 0) if model in self.counts else 0 for model in MODELS}
        for replica in self.deployment.replicas.values():
            assert replica.is_ready or replica.phase is ReplicaPhase.STANDBY
            wanted = self.versions[replica.model, self.deployment.targets[replica.model].revision]
            assert self.has_failed_start or self.versions[replica.model, replica.revision] == wanted, "one version is left"
        self.deployment.check()


DeploymentMachine.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestDeployment = DeploymentMachine.TestCase
