"""Tests which of file, environment and flags wins, what is refused, and how the refusal reads."""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import pytest
import yaml

from headrace.bundled import DEFAULT_MODEL, bundled_adapter
from headrace.cli.config.faults import faults
from headrace.cli.config.load import INSTEAD, ServeSource, load
from headrace.cli.config.sections import ServeConfig, is_fetched
from headrace.cli.config.yaml_files import Raw, dump_yaml, parse_yaml
from headrace.cli.flags.flag import GivenFlags
from headrace.core.errors import ConfigError
from headrace.core.option import Reload, leaves, options
from headrace.core.strict_decode import decode
from headrace.engine.config import EngineConfig
from headrace.fleet.config import FIXED, FIXED_GATEWAY, ModelSpec, runs_alike
from headrace.fleet.files import ReplicaFiles, gateway_content
from headrace.fleet.launcher import SECRET_VARIABLES, without_secrets
from headrace.fleet.weights import resolve_model
from headrace.gateway.config import GatewayConfig, config_from
from headrace.gateway.http.config import HttpTls
from headrace.lab.plan import here
from headrace.machine.hosts import is_loopback
from tests.cli.conftest import Headrace

pytestmark = pytest.mark.pure


def load_text(tmp_path: Path, text: str, environment: dict[str, str] | None = None, **flags: object) -> ServeConfig:
    file = tmp_path / "headrace.yaml"
    file.write_text(text)
    own = {"XDG_STATE_HOME": str(tmp_path), **(environment or {})}
    return load(file, own, GivenFlags({path.replace("__", "."): value for path, value in flags.items()}))


def refusal(tmp_path: Path, text: str, environment: dict[str, str] | None = None, **flags: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text, environment, **flags)
    return caught.value


def test_keys_that_take_a_restart_are_those_that_the_supervisor_or_its_gateways_refuse_to_change() -> None:
    supervisor = {
        name for name, described in options(ServeConfig) if described.reload is not Reload.LIVE and name not in ("gateway", "state")
    }
    assert supervisor == set(FIXED)
    restart = {leaf.path for leaf in leaves(GatewayConfig) if leaf.option.reload is Reload.RESTART}
    assert set(FIXED_GATEWAY) | {"state"} <= restart


def test_file_is_decoded_into_every_packages_own_config(tmp_path: Path, model_folder: Path) -> None:
    text = f"""
models:
  - name: small
    aliases: [s, tiny]
    replicas: 2
    engine: {{model: {model_folder}, max_num_seqs: 8, queue_policy: fair}}
  - engine: {{model: {model_folder}}}
gateway:
  port: 9000
  limits: {{max_body_bytes: 5}}
  api_keys:
    - {{key: a-long-enough-key, tenant: acme, tier: premium}}
"""
    config = load_text(tmp_path, text)
    small, other = config.models
    assert (small.served_name, small.aliases, small.replicas) == ("small", ("s", "tiny"), 2)
    assert small.engine is not None
    assert (small.engine.max_num_seqs, small.engine.queue_policy) == (8, "fair")
    assert other.served_name == "some-model"
    assert (config.gateway.port, config.gateway.limits.max_body_bytes, config.gateway.limits.max_requests) == (9000, 5, 4096)
    key = config.gateway.api_keys[0]
    assert (key.tenant, key.tier, key.key) == ("acme", "premium", "")
    assert key.sha256 == hashlib.sha256(b"a-long-enough-key").hexdigest()


def test_the_supervisor_gets_resolved_folders_and_no_plain_key(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{replicas: 2, engine: {{model: {model_folder}, seed: 3}}}}]\ndrain_timeout_s: 5\n"
    text += "gateway: {api_keys: [{key: a-long-enough-key}]}"
    fleet = load_text(tmp_path, text).fleet(lambda model: Path("/resolved") / Path(model).name).checked()
    (model,) = fleet.models
    assert (model.name, model.folder, model.replicas, model.engine["seed"]) == ("some-model", Path("/resolved/some-model"), 2, 3)
    assert "model" not in model.engine
    assert fleet.drain_timeout_s == 5.0
    assert "a-long-enough-key" not in repr(fleet.gateway)
    assert config_from({**fleet.gateway, "models": [{"name": "m", "folder": "/", "replicas": [{"name": "r", "address": "unix:/r"}]}]})


@pytest.mark.parametrize("variable", SECRET_VARIABLES)
def test_a_foreign_servers_key_is_not_looked_for_where_the_gateway_cannot_see_it(tmp_path: Path, variable: str) -> None:
    for name in (variable, f"{variable}_OF_OTHERS"):
        assert name not in without_secrets({name: "x"})
        text = f'models: [{{upstreams: [{{url: "http://127.0.0.1:9000/v1", model: m, api_key_env: {name}}}]}}]'
        refused = refusal(tmp_path, text)
        assert refused.where == "models[0].upstreams[0].api_key_env"
        assert "api_key_file" in refused.remedy


def test_a_model_may_be_answered_by_a_foreign_server(tmp_path: Path, model_folder: Path) -> None:
    text = f"""
models:
  - upstreams: [{{url: "http://127.0.0.1:9000/v1", model: its-name, api_key_env: ITS_KEY, silence_s: 30}}]
    aliases: [far]
  - engine: {{model: {model_folder}}}
"""
    config = load_text(tmp_path, text)
    assert ([model.served_name for model in config.models], [model.num_engines for model in config.models]) == (
        ["its-name", "some-model"],
        [0, 1],
    )
    far, near = config.fleet(lambda model: Path(model)).checked().models
    assert (far.folder, far.replicas, far.aliases) == (None, 0, ("far",))
    (server,) = far.upstreams
    assert (server["url"], server["api_key_env"], server["silence_s"]) == ("http://127.0.0.1:9000/v1", "ITS_KEY", 30.0)
    assert (near.folder, near.upstreams) == (model_folder, ())
    assert config_from({"models": [{"name": far.name, "upstreams": [dict(server)]}]})


def test_a_model_may_have_engines_and_foreign_servers_behind_them(tmp_path: Path, model_folder: Path) -> None:
    text = f"""
models:
  - engine: {{model: {model_folder}}}
    replicas: 2
    tool_call_parser: hermes
    upstreams: [{{url: "http://127.0.0.1:9000/v1", model: its-name, api_key_env: ITS_KEY}}]
"""
    fleet = load_text(tmp_path, text).fleet(lambda model: Path(model)).checked()
    (model,) = fleet.models
    assert (model.folder, model.replicas, model.gateway["tool_call_parser"]) == (model_folder, 2, "hermes")
    assert fleet.key_variables == {"ITS_KEY"}
    replicas = [
        ReplicaFiles(f"some-model-{number}", "some-model", [Path("/run")], {"address": f"unix:/run/e{number}.sock"}) for number in range(2)
    ]
    (served,) = config_from(json.loads(json.dumps(gateway_content(fleet, replicas)))).models
    assert ([replica.name for replica in served.replicas], served.upstreams[0].model) == (["some-model-0", "some-model-1"], "its-name")


def test_a_foreign_server_can_be_named_by_the_environment_alone() -> None:
    environment = {"HEADRACE_MODELS__0__UPSTREAMS__0__URL": "http://h/v1", "HEADRACE_MODELS__0__NAME": "far"}
    (model,) = load(None, environment).models
    assert (model.served_name, model.engine) == ("far", None)


def test_adapters_of_the_file_are_the_engines(tmp_path: Path, model_folder: Path) -> None:
    (tmp_path / "sql").mkdir()
    text = f"models: [{{engine: {{model: {model_folder}}}, adapters: {{sql: {tmp_path}/sql, my.pirate: pirate}}}}]\nlora_root: {tmp_path}"
    config = load_text(tmp_path, text)
    fleet = config.fleet(Path)
    [model] = fleet.models
    assert model.adapters == {"sql": str(tmp_path / "sql"), "my.pirate": str(bundled_adapter("pirate"))}
    assert (model.engine["enable_lora"], model.engine["lora_modules"], fleet.adapters_root) == (True, [], tmp_path)
    assert "model" not in model.engine
    without = load_text(tmp_path, f"models: [{{engine: {{model: {model_folder}}}}}]").fleet(Path)
    assert (without.models[0].engine["enable_lora"], without.adapters_root) == (False, None)


@pytest.mark.parametrize(
    ("model", "more", "reason"),
    [
        ("adapters: {sql: /none}", "", "models[0].adapters.sql: there is no folder '/none'."),
        (
            "adapters: {sql: org/hub-id}",
            "",
            "models[0].adapters.sql: there is no folder 'org/hub-id'. Give a folder as PEFT saves it, or one ",
        ),
        ("adapters: {tiny: pirate}", "", "models[0].adapters.tiny: 'tiny' is served twice."),
        ("adapters: {small: pirate}", "", "models[0].adapters.small: 'small' is served twice."),
        ("adapters: {a b: pirate}", "", "models[0].adapters.a b: 'a b' is not a model name."),
        ("adapters: {sql: 7}", "", "models[0].adapters.sql: expected str"),
        ("adapters: [sql]", "", "models[0].adapters: expected object, got array"),
        ("adapters: {}", "lora_root: /none", "lora_root: there is no folder '/none'."),
        ("adapters: {sql: pirate}", "routes: {sql: {targets: [{model: tiny}]}}", "routes.sql: 'sql' is served twice."),
    ],
)
def test_adapters_that_cannot_be_served_are_refused(model: str, more: str, reason: str, tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{name: tiny, aliases: [small], engine: {{model: {model_folder}}}, {model}}}]\n{more}"
    assert str(refusal(tmp_path, text)).startswith(reason)
    [fault] = faults(tmp_path / "headrace.yaml", {})
    assert str(fault.error).startswith(reason)


def test_adapters_are_named_in_one_place_and_of_engines_that_run_here(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}, lora_modules: []}}}}]"
    assert str(refusal(tmp_path, text)) == "models[0].engine.lora_modules: is not a key. Name adapters in models[N].adapters."
    text = "models: [{name: far, adapters: {sql: pirate}, upstreams: [{url: 'http://127.0.0.1/v1', model: m}]}]"
    assert str(refusal(tmp_path, text)).startswith("models[0].adapters: are of engines that are started here")


DRAFTING = {"method": "draft_model", "model": "headrace-draft"}


def drafting(section: str, model_folder: Path) -> str:
    return f"models: [{{engine: {{model: {model_folder}, device: cpu, speculative_config: {section}}}}}]"


def test_speculation_is_set_in_the_file_by_variables_and_by_a_flag(tmp_path: Path, model_folder: Path) -> None:
    file = load_text(tmp_path, drafting(json.dumps(DRAFTING), model_folder))
    prefix = "HEADRACE_MODELS__0__ENGINE__SPECULATIVE_CONFIG"
    without = drafting("null", model_folder)
    assert load_text(tmp_path, without, {f"{prefix}__{key.upper()}": value for key, value in DRAFTING.items()}) == file
    assert load_text(tmp_path, without, {prefix: json.dumps(DRAFTING)}) == file
    assert load_text(tmp_path, without, model__engine__speculative_config=DRAFTING) == file
    assert load_text(tmp_path, without) != file


def test_a_reload_with_other_speculation_starts_engines_anew(tmp_path: Path, model_folder: Path) -> None:
    def spec(section: str) -> ModelSpec:
        [model] = load_text(tmp_path, drafting(section, model_folder)).fleet(resolve_model).models
        return model

    held = spec(json.dumps(DRAFTING))
    assert held.engine["speculative_config"]["model"] == str(resolve_model("headrace-draft"))  # type: ignore[index]
    assert runs_alike(held, spec(json.dumps(DRAFTING)))
    assert not runs_alike(held, spec(json.dumps({**DRAFTING, "num_speculative_tokens": 3})))
    assert not runs_alike(held, spec("null"))
    assert decode(EngineConfig, {**held.engine, "model": "m"}).checked().speculative_config is not None


@pytest.mark.parametrize(
    ("section", "where", "what"),
    [
        ("{method: eagle}", ".method", "'eagle' is not supported."),
        ("{method: ngram, revision: main}", ".revision", "is not supported. Download the revision you want"),
        ("{method: ngram, methods: x}", ".methods", "is not a known key. Did you mean method?"),
        ("{method: draft_model, model: ./no-folder}", ".model", "there is no folder './no-folder'"),
        ("{method: draft_model, model: headrace-tiny, prompt_lookup_max: 2}", ".prompt_lookup_max", "is for the method ngram"),
        ("[ngram]", "", "expected object or null, got array."),
    ],
)
def test_speculation_is_refused_under_its_key_and_the_name_of_what_set_it(
    section: str, where: str, what: str, tmp_path: Path, model_folder: Path
) -> None:
    path = "models[0].engine.speculative_config"
    assert str(refusal(tmp_path, drafting(section, model_folder))).startswith(f"{path}{where}: {what}")
    (tmp_path / "headrace.yaml").write_text(drafting("null", model_folder))
    given = GivenFlags(
        {"model.engine.speculative_config": parse_yaml(section, "x")}, {"model.engine.speculative_config": "--speculative-config"}
    )
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "headrace.yaml", {"XDG_STATE_HOME": str(tmp_path)}, given)
    assert str(caught.value).startswith(f"--speculative-config{where}: {what}")


def test_adapters_that_are_turned_off_are_refused_by_both_names(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}, enable_lora: false}}, adapters: {{sql: pirate}}}}]"
    why = "is off, and there are adapters (--lora-modules). Leave out one of the two."
    assert str(refusal(tmp_path, text)) == f"models[0].engine.enable_lora: {why}"
    file = tmp_path / "headrace.yaml"
    file.write_text(f"models: [{{engine: {{model: {model_folder}}}}}]")
    values = {"model.engine.enable_lora": False, "model.adapters": {"sql": "pirate"}}
    flags = GivenFlags(values, {"model.engine.enable_lora": "--no-enable-lora", "model.adapters": "--lora-modules"})
    for given in (None, file):
        with pytest.raises(ConfigError) as caught:
            load(given, {}, flags)
        assert str(caught.value) == f"--no-enable-lora: {why}"
    alone = load(file, {}, GivenFlags({"model.engine.enable_lora": False}, {"model.engine.enable_lora": "--no-enable-lora"}))
    both = load(file, {}, GivenFlags(values | {"model.engine.enable_lora": True}, flags.names))
    assert [config.fleet(Path).models[0].engine["enable_lora"] for config in (alone, both)] == [False, True]


def test_environment_wins_over_the_file_and_flags_over_both(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}, seed: 1, max_num_seqs: 4}}}}]\ngateway: {{port: 1000}}"
    environment = {
        "HEADRACE_MODELS__0__ENGINE__SEED": "2",
        "HEADRACE_GATEWAY__PORT": "2000",
        "HEADRACE_GATEWAY__API_KEYS__0__KEY": "1234567890",
        "HEADRACE_CACHE_DIR": "/not/configuration",
        "HEADRACE_DRAIN_TIMEOUT_S": "7",
        "OTHER__PORT": "1",
    }
    config = load_text(tmp_path, text, environment, gateway__port=3000)
    engine = config.models[0].engine
    assert engine is not None
    assert (engine.seed, engine.max_num_seqs, config.gateway.port, config.drain_timeout_s) == (2, 4, 3000, 7.0)
    assert config.gateway.api_keys[0].sha256 == hashlib.sha256(b"1234567890").hexdigest()  # digits stay a string where one is wanted


def test_default_model_is_served_when_nothing_names_one(tmp_path: Path, model_folder: Path) -> None:
    config = load(None, {}, GivenFlags({"model.engine.seed": 5}))
    engine = config.models[0].engine
    assert engine is not None
    assert (engine.model, engine.seed) == (DEFAULT_MODEL, 5)
    assert config.models[0].served_name == DEFAULT_MODEL
    named = load(None, {}, GivenFlags({"model.engine.model": str(model_folder), "model.name": "mine"}))
    assert named.models[0].served_name == "mine"


def scaled_pods(most: int, namespace: str = "") -> str:
    service = f"{{service: e, workload: statefulsets/e{namespace and f', namespace: {namespace}'}}}"
    return f"remote: {{model: M, tls_dir: /t, kubernetes: {service}}}, autoscale: {{max: {most}}}"


@pytest.mark.parametrize(
    ("text", "where", "what"),
    [
        ("models: [{engine: {model: M, max_num_seq: 1}}]", "models[0].engine.max_num_seq", "Did you mean max_num_seqs?"),
        ("models: [{engine: {model: M}, remote: {model: M, replicas: []}}]", "models[0]", "exactly one of engine and remote"),
        (
            "models: [{engine: {model: M}, upstreams: [{url: 'http://h/v1', name: some-model-7}]}]",
            "models[0].upstreams[0].name",
            "how a replica of this model is named",
        ),
        ("models: [{name: x}]", "models[0]", "exactly one of engine and upstreams"),
        ("models: [{remote: {model: M}}]", "models[0].remote", "exactly one of replicas and kubernetes"),
        (
            "models: [{remote: {model: M, tls_dir: /t, kubernetes: {service: e}}, autoscale: {max: 2}}]",
            "models[0].remote.kubernetes.workload",
            "is missing beside autoscale. Name what has the pods",
        ),
        (
            f"models: [{{name: a, {scaled_pods(257)}}}]",
            "models[0].autoscale.max",
            "257 is outside 1..256",
        ),
        *(
            (
                f"models: [{{name: a, {scaled_pods(2, one)}}}, {{name: b, {scaled_pods(3, two)}}}]",
                "models[1].remote.kubernetes.workload",
                "statefulsets/e is scaled by the load of models[0] already",
            )
            for one, two in (("", ""), ("x", "x"), ("x", ""))
        ),
        ("models: [{engine: {model: M}, autoscale: {max: 65}}]", "models[0].autoscale.max", "More engines than 64 are pods"),
        ("models: [{engine: {model: M}}]\nsleep_budget_bytes: 1000", "sleep_budget_bytes", "is set, and no model sleeps"),
        ("models: [{name: x, upstreams: [{url: 'http://h/v1'}]}]\nray: {}", "ray", "no model has `engine`"),
        (
            "models: [{remote: {model: M, tls_dir: /t, kubernetes: {service: e, workload: deployments/e}}, autoscale: {min: 3, max: 2}}]",
            "models[0].autoscale.min",
            "3 is more than max, 2",
        ),
        (
            "models: [{remote: {model: M, kubernetes: {service: e}, replicas: [{name: a, address: 'unix:/e'}]}}]",
            "models[0].remote",
            "exactly one of replicas and kubernetes",
        ),
        ("models: [{remote: {model: M, kubernetes: {service: e}}}]", "models[0].remote.tls_dir", "is missing beside kubernetes"),
        ("models: [{remote: {model: M, tls_dir: /t, kubernetes: {}}}]", "models[0].remote.kubernetes.service", "is missing"),
        *(
            (
                f"models: [{{remote: {{model: M, tls_dir: /t, kubernetes: {{service: e, {key}: {value}}}}}}}]",
                f"models[0].remote.kubernetes.{key}",
                what,
            )
            for key, value, what in (
                ("namespace", "../x", "is not a name in Kubernetes"),
                ("port_name", "'7001/x'", "is not a name in Kubernetes"),
                ("workload", "pods/x", "is no workload. Write deployments/NAME, statefulsets/NAME or leaderworkersets/NAME."),
                ("workload", "statefulsets/../x", "is no workload"),
            )
        ),
        (
            "models: [{remote: {model: M, tls_dir: /t, replicas: [{name: a, address: 'h:1'}]}}]\nadmin: {listen: 'h:2', tls_dir: /t}",
            "admin.tls_dir",
            "is the folder that the gateways show to engines",
        ),
        (
            "models: [{engine: {model: M}}]\ngateway: {timeouts: {keep_alive_s: .inf}}",
            "gateway.timeouts.keep_alive_s",
            "not a finite number",
        ),
        ("models: [{engine: {model: M}, replicas: 65}]", "models[0].replicas", "65 is outside 1..64"),
        ("models: [{name: x, upstreams: [{url: 'file:///etc'}]}]", "models[0].upstreams[0].url", "not the address of a server"),
        ("models: [{name: x, upstreams: [{ulr: 'http://h/v1'}]}]", "models[0].upstreams[0].ulr", "Did you mean url?"),
        ("models: [{name: x, replicas: 2, upstreams: [{url: 'http://h/v1'}]}]", "models[0].replicas", "this model has none"),
        ("models: [{upstreams: [{url: 'http://h/v1'}]}]", "models[0].name", "not a model name"),
        ("gatway: {}", "gatway", "Did you mean gateway?"),
        ("models: [{engine: {model: M}}]\ngateway: {limits: {max_body: 1}}", "gateway.limits.max_body", "Did you mean max_body_bytes?"),
        ("models: [{engine: {model: M, max_num_seqs: many}}]", "models[0].engine.max_num_seqs", "expected int, got str"),
        ("models: [{engine: {model: M, max_num_seqs: 0}}]", "models[0].engine.max_num_seqs", "0 is outside 1..4096"),
        ("models: [{engine: {model: M, dtype: int8}}]", "models[0].engine.dtype", "'int8' is not one of"),
        ("models: [{engine: {model: M}, replicas: 0}]", "models[0].replicas", "outside 1..64"),
        ("models: [{engine: {model: /absent}}]", "models[0].engine.model", "there is no folder '/absent'"),
        ("models: [{engine: {}}]", "models[0].engine.model", "is missing"),
        ("models: []", "models", "is empty"),
        ("models: [{engine: {model: M}, name: a}, {engine: {model: M}, name: a}]", "models[1].name", "is served twice"),
        ("models: [{engine: {model: M}}]\ngateway: {models: []}", "gateway.models", "Set models at the top level"),
        ("models: [{engine: {model: M}}]\ngateway: {timeouts: {drain_s: 1}}", "gateway.timeouts.drain_s", "Set drain_timeout_s"),
        ("models: [{engine: {model: M}}]\ngateway: {tiers: {free: {daily_tokens: 1}}}", "gateway.tiers", "Set tiers at the top level"),
        ("models: [{engine: {model: M}}]\ngateway: {salt_key: 0123456789}", "gateway.salt_key", "Set site_key at the top level"),
        ("models: [{engine: {model: M}}]\ngateway: {prices: {M: {input: 1}}}", "gateway.prices", "Set prices at the top level"),
        ("models: [{engine: {model: M}}]\ngateway: {routes: {}}", "gateway.routes", "Set routes at the top level"),
        ("models: [{engine: {model: M}, name: a}]\nroutes: {r: {targets: [{model: b}]}}", "routes.r.targets[0].model", "There are: a."),
        ("models: [{engine: {model: M}, name: a}]\nroutes: {a: {targets: [{model: a}]}}", "routes.a", "is served twice"),
        (
            "models: [{engine: {model: M}, name: a}]\nroutes: {r: {targets: [{model: a, version: 2}]}}",
            "routes.r.targets[0].version",
            "Write it in quotes",
        ),
        ("models: [{engine: {model: M}}]\ngateway: {usage: {retention_days: 1}}", "gateway.usage", "Set usage at the top level"),
        ("models: [{engine: {model: M}}]\ngateway: {state: /s}", "gateway.state", "Set state at the top level"),
        ("models: [{engine: {model: M}}]\ndrain_timeout_s: -1", "drain_timeout_s", "outside 0..86400"),
        ("models: [{engine: {model: M}}]\ngateway: {port: 70000}", "gateway.port", "outside 0..65535"),
        ("models: [{engine: {model: M}}]\ngateway: {api_keys: [{key: short}]}", "gateway.api_keys[0].key", "shorter than"),
        ("gateway: {api_keys: [{key: long-enough, role: root}]}", "gateway.api_keys[0].role", "'root' is not one of user, reader"),
        ("tiers: {'role:reader': {weight: 2}}", "tiers.role:reader", "Give the tier another name."),
        ("models: [{engine: {model: M}}]\ngateway: {host: 0.0.0.0}", "gateway.host", "--api-key"),
        ("models: [{engine: {model: M, device: tpu}}]", "models[0].engine.device", "is not one of auto, cuda, cpu"),
        ("models: [{engine: {model: M}}]\nmodels: []", "headrace.yaml:2", "models is given twice, first on line 1"),
        ("models:\n - engine: &a {model: M}\n - engine: *a", "headrace.yaml:3:12", "aliases"),
        ("models: [{engine: {model: M}}]\ngateway: {port: 0x_}", "gateway.port", "expected int, got str. Write it in digits"),
        ("models: [{engine: {model: M}}]\ngateway: {port: 8_000}", "gateway.port", "expected int, got str. Write it in digits"),
        ("models: [{engine: {model: M}}]\ngateway: {port: 2:13:20}", "gateway.port", "expected int, got str. Write it in digits"),
        ("models: [{engine: {model: M}}]\nallow_open: yes", "allow_open", "expected bool, got str. Write true or false"),
        ("models: [{name: 007, engine: {model: M}}]", "models[0].name", "expected str, got int. Write it in quotes."),
        ("gateway:\n  port: !!int ''", "headrace.yaml:2:9", "this is no valid int"),
        ("gateway:\n  port: !!int 1_0", "headrace.yaml:2:9", "this is no valid int"),
        ("allow_open: !!bool yes", "headrace.yaml:1:13", "this is no valid bool"),
        (f"drain_timeout_s: {'9' * 5000}", "headrace.yaml:1:18", "an integer has at most 100 characters, and this one has 5000"),
        (f"gateway: {{port: 0x{'f' * 5000}}}", "headrace.yaml:1:17", "an integer has at most 100 characters, and this one has 5002"),
        (f"gateway: {{port: 0o{'7' * 99}}}", "headrace.yaml:1:17", "an integer has at most 100 characters, and this one has 101"),
        ("run_dir: a\nlog_format: \x01", "headrace.yaml:2", "U+0001 is not allowed"),
        ("gateway:\n  port: !!timestamp 2026-11-23", "headrace.yaml:2:9", "not valid YAML"),
        ("models: !!python/object/apply:os.system [id]", "headrace.yaml:1:9", "not valid YAML"),
        ("? [a, b]\n: 1", "headrace.yaml:1:3", "unhashable key"),
        ("models: [", "headrace.yaml:1:10", "not valid YAML"),
        ("just a string", "headrace.yaml", "not a mapping"),
    ],
)
def test_wrong_files_are_refused_with_path_and_remedy(tmp_path: Path, model_folder: Path, text: str, where: str, what: str) -> None:
    error = refusal(tmp_path, text.replace("model: M", f"model: {model_folder}"))
    assert error.where.endswith(where), error
    assert what in str(error), error


@pytest.mark.parametrize("path", INSTEAD)
def test_a_key_that_is_not_here_is_refused_with_what_to_write_instead(tmp_path: Path, path: str) -> None:
    steps = re.split(r"[.\[\]]+", path.replace("[N]", "[0]").replace("[NAME]", ".free"))
    value: object = {steps[-1]: 1}
    for step in reversed(steps[:-1]):
        value = [value] if step.isdecimal() else {step: value}
    refused = refusal(tmp_path, json.dumps(value))
    where = path.replace("[N]", "[0]").replace("[NAME]", ".free")
    assert (refused.where, refused.reason, refused.remedy) == (where, "is not a key", INSTEAD[path])
    variable = f"HEADRACE_{'__'.join(steps).upper()}"
    if "__" in variable:
        refused = refusal(tmp_path, "", {variable: "1"})
        assert (refused.where, refused.reason, refused.remedy) == (variable, "is not a key", INSTEAD[path])


def test_deep_nesting_is_refused_with_its_line(tmp_path: Path) -> None:
    error = refusal(tmp_path, "a:\n " + "[" * 3000)
    assert ":2:" in error.where
    assert error.reason == "is not valid YAML: it is nested too deeply"


def test_a_date_is_a_string_as_a_name_may_be(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"models: [{{name: 2026-11-23, engine: {{model: {model_folder}}}}}]")
    assert load(file, {}).models[0].served_name == "2026-11-23"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010000", 10000),
        ("08080", 8080),
        ("0x1F90", 8080),
        ("0o17620", 8080),
        ("-0", 0),
        ("1e-3", 0.001),
        ("5E+2", 500.0),
        ("-.5", -0.5),
        ("1.", 1.0),
        ("-.inf", -math.inf),
        ("True", True),
        ("~", None),
        ("", None),
        *(
            (text, text)
            for text in ("no", "No", "off", "ON", "yes", "y", "1_000", "1:30", "0b11", "-0x1", "1.2.3", "=", "0o8", "2026-11-23")
        ),
        ("'no'", "no"),
        ("!!str 010", "010"),
        ("!!int 010", 10),
    ],
)
def test_words_and_numbers_are_read_as_yaml_1_2_reads_them(text: str, value: object) -> None:
    """PyYAML's 1.1 made 4096 of the port 010000 and false of the country Norway."""
    read = parse_yaml(f"a: {text}", "x")
    assert read == {"a": value}
    assert type(cast(Raw, read)["a"]) is type(value)


def test_the_letters_that_yaml_1_1_reads_as_switches_are_written_in_quotes() -> None:
    """PyYAML reads them as text; other readers of 1.1 do not."""
    letters = ["y", "Y", "n", "N"]
    written = dump_yaml({"letters": letters, "y": "yy"})
    assert written.splitlines() == ["letters:", "- 'y'", "- 'Y'", "- 'n'", "- 'N'", "'y': yy"]
    assert parse_yaml(written, "x") == {"letters": letters, "y": "yy"}


def test_a_key_is_text_whatever_it_looks_like(tmp_path: Path, model_folder: Path) -> None:
    text = f"""
models: [{{name: "no", engine: {{model: {model_folder}}}}}, {{name: "007", engine: {{model: {model_folder}}}}}]
tiers: {{on: {{requests_per_minute: 5}}, 1e3: {{}}}}
prices: {{no: {{input: 1}}, 007: {{input: 2}}}}
"""
    config = load_text(tmp_path, text)
    assert sorted(config.tiers) == ["1e3", "on"]
    assert sorted(config.prices) == ["007", "no"]


def test_what_is_written_as_yaml_is_read_as_the_same_by_either_version() -> None:
    words = ["1e3", "08", "0o17", "no", "1_000", "1:30", "=", "~", "", "true", "-.5", "<<", ".inf", "2026-11-23", "plain"]
    value = {"words": words, "rest": [1, 1e-5, True, None], "no": 1, "007": 2, "null": 3}
    written = dump_yaml(value)
    assert parse_yaml(written, "x") == yaml.safe_load(written) == value


@pytest.mark.parametrize(
    ("text", "environment", "where"),
    [
        ("models: [{engine: {model: headrace-tiny}}]\ngateway: []", {"HEADRACE_GATEWAY__PORT": "1"}, "gateway"),
        (
            "models: [{engine: {model: headrace-tiny}}]\ngateway: {timeouts: 5}",
            {"HEADRACE_GATEWAY__TIMEOUTS__KEEP_ALIVE_S": "1"},
            "gateway.timeouts",
        ),
        ("models: 5", {"HEADRACE_MODELS__0__NAME": "x"}, "models"),
        ("models: [5]", {"HEADRACE_MODELS__0__NAME": "x"}, "models[0]"),
        ("", {"HEADRACE_MODELS__0__ENGINE": "[]", "HEADRACE_MODELS__0__ENGINE__SEED": "1"}, "HEADRACE_MODELS__0__ENGINE"),
    ],
)
def test_a_section_of_the_wrong_type_is_refused_where_it_stands_and_not_at_the_variable_inside_it(
    tmp_path: Path, text: str, environment: dict[str, str], where: str
) -> None:
    error = refusal(tmp_path, text, environment)
    assert (error.where, error.reason.split()[1].strip(",")) == (where, "array" if where == "models" else "object")
    if not where.startswith("HEADRACE"):
        assert [fault.error.where for fault in faults(tmp_path / "headrace.yaml", environment)][:1] == [where]


def test_a_variable_fills_a_section_that_the_file_leaves_empty(tmp_path: Path, model_folder: Path) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"models: [{{engine: {{model: {model_folder}}}}}]\ngateway:\n")
    assert load(file, {"HEADRACE_GATEWAY__PORT": "1234"}).gateway.port == 1234


@pytest.mark.parametrize(
    ("name", "value", "what"),
    [
        ("HEADRACE_GATEWAY__PROT", "1", "Did you mean HEADRACE_GATEWAY__PORT?"),
        ("HEADRACE_MODELS__3__ENGINE__SEDE", "1", "Did you mean HEADRACE_MODELS__3__ENGINE__SEED?"),
        ("HEADRACE_MODEL__MAX_MODEL_LEN", "1", "Did you mean HEADRACE_MODELS__0__ENGINE__MAX_MODEL_LEN?"),
        ("HEADRACE_DRAIN_TIMEOUT_S", "-1", "outside 0..86400"),
        ("HEADRACE_GATEWAY__PORT", "many", "expected int"),
        ("HEADRACE_GATEWAY__PORT__X", "1", "nothing can be set at 'x'"),
        ("HEADRACE_MODELS__7__NAME", "x", "filled in order"),
        ("HEADRACE_SERVER__PORT", "1", "not a known key"),
    ],
)
def test_wrong_variables_are_refused_by_name(tmp_path: Path, model_folder: Path, name: str, value: str, what: str) -> None:
    assert what in str(refusal(tmp_path, f"models: [{{engine: {{model: {model_folder}}}}}]", {name: value}))


@pytest.mark.parametrize(
    ("environment", "flag_names", "where"),
    [
        ({}, {}, "models[0].engine.seed"),
        ({"HEADRACE_MODELS__0__ENGINE__SEED": "x"}, {}, "HEADRACE_MODELS__0__ENGINE__SEED"),
        ({"HEADRACE_MODELS__0__ENGINE": "{seed: x, model: M}"}, {}, "HEADRACE_MODELS__0__ENGINE.seed"),
        ({"HEADRACE_MODELS__0__ENGINE": "{model: M}", "HEADRACE_MODELS__0__ENGINE__SEED": "x"}, {}, "HEADRACE_MODELS__0__ENGINE__SEED"),
        ({"HEADRACE_MODELS__0__ENGINE__SEE": "x"}, {}, "HEADRACE_MODELS__0__ENGINE__SEE"),
        ({"HEADRACE_MODELS__0__ENGINE__SEED": "1"}, {"model.engine.seed": "--seed"}, "--seed"),
    ],
)
def test_a_wrong_value_is_refused_under_the_name_of_what_set_it(
    tmp_path: Path, model_folder: Path, environment: dict[str, str], flag_names: dict[str, str], where: str
) -> None:
    file = tmp_path / "headrace.yaml"
    file.write_text(f"models: [{{engine: {{model: {model_folder}, seed: x}}}}]")
    values = {name: value.replace("M}", f"{model_folder}}}") for name, value in environment.items()}
    with pytest.raises(ConfigError) as caught:
        load(file, values, GivenFlags(dict.fromkeys(flag_names, "x"), flag_names))
    assert caught.value.where == where


def test_a_name_that_begins_like_another_is_not_taken_for_it(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}, max_num_seqs: 0}}}}]"
    error = refusal(tmp_path, text, {"HEADRACE_MODELS__0__ENGINE__MAX_NUM_BATCHED_TOKENS": "64"})
    assert error.where == "models[0].engine.max_num_seqs"


def test_flag_of_one_model_is_refused_when_the_file_declares_several(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{name: a, engine: {{model: {model_folder}}}}}, {{name: b, engine: {{model: {model_folder}}}}}]"
    assert load_text(tmp_path, text, gateway__port=5).gateway.port == 5
    path = "model.engine.memory_fraction"
    with pytest.raises(ConfigError, match=r"^--gpu-memory-utilization: the file declares 2 models"):
        load(tmp_path / "headrace.yaml", {}, GivenFlags({path: 0.5}, {path: "--gpu-memory-utilization"}))


def test_open_server_beyond_loopback_must_be_said(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}}}}}]\ngateway: {{host: '::'}}\n"
    assert refusal(tmp_path, text).where == "gateway.host"
    assert load_text(tmp_path, text + "allow_open: true").gateway.host == "::"
    assert load_text(tmp_path, text, {"HEADRACE_GATEWAY__API_KEYS__0__KEY": "a-long-enough-key"}).gateway.api_keys


def test_names_of_hosts_and_hubs() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", ""))
    assert is_fetched("Qwen/Qwen3-0.6B")
    assert is_fetched("gpt2")
    assert not any(is_fetched(name) for name in ("/a/b", "./a", "a/b/c", "~/x", ""))


@pytest.mark.parametrize(
    "second", ["key: a-long-enough-key", f"sha256: {hashlib.sha256(b'a-long-enough-key').hexdigest()}"], ids=["same key", "its digest"]
)
def test_one_key_of_two_tenants_is_refused_before_anything_starts(tmp_path: Path, model_folder: Path, second: str) -> None:
    keys = f"[{{key: a-long-enough-key, tenant: acme}}, {{{second}, tenant: other}}]"
    error = refusal(tmp_path, f"models: [{{engine: {{model: {model_folder}}}}}]\ngateway: {{api_keys: {keys}}}")
    assert error.where == "gateway.api_keys"
    assert "a-long-enough-key" not in str(error)


def test_vllms_flags_of_a_certificate_are_the_gateways(tmp_path: Path, model_folder: Path) -> None:
    text = f"models: [{{engine: {{model: {model_folder}}}}}]\n"
    config = load_text(tmp_path, text, gateway__tls__certificate="/c.pem", gateway__tls__key="/k.pem")
    assert config.gateway.tls == HttpTls(certificate="/c.pem", key="/k.pem")
    assert config.fleet(Path).gateway["tls"] == {"certificate": "/c.pem", "key": "/k.pem"}
    assert refusal(tmp_path, text, gateway__tls__certificate="/c.pem").where == "gateway.tls.key"


def test_a_key_that_cannot_be_read_here_fails_the_check(headrace: Headrace, tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("models: [{name: far, upstreams: [{url: 'http://127.0.0.1:9/v1', api_key_env: HEADRACE_TEST_NOT_SET}]}]")
    done = headrace("config", "check", str(file))
    assert done.returncode == 3
    assert "models[0].upstreams[0].api_key_env: the variable HEADRACE_TEST_NOT_SET is not set" in done.stderr


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("empty", "the folder 'FOLDER/empty' has no config.json. A model's folder holds config.json"),
        ("files", "the folder 'FOLDER/files' has no config.json. Give its file: FOLDER/files/a.gguf."),
        ("files/b.gguf", "there is no file 'FOLDER/files/b.gguf'. Did you mean FOLDER/files/a.gguf?"),
        ("modl", "there is no folder 'FOLDER/modl'. Did you mean FOLDER/model?"),
        ("elsewhere", "there is no folder 'FOLDER/elsewhere'."),
    ],
)
def test_a_model_that_is_not_there_says_what_is(headrace: Headrace, tmp_path: Path, name: str, said: str) -> None:
    for folder, file in (("empty", ""), ("files", "a.gguf"), ("model", "config.json")):
        (tmp_path / folder).mkdir()
        if file:
            (tmp_path / folder / file).touch()
    done = headrace("serve", str(tmp_path / name))
    assert done.returncode == 3
    assert said.replace("FOLDER", str(tmp_path)) in done.stderr


def test_differences_name_models_and_show_no_secret(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "headrace.yaml"
    tiny = {"engine": {"model": str(model_folder), "num_threads": 1}}

    def write(*models: object, **gateway: object) -> None:
        path.write_text(json.dumps({"models": models, "gateway": gateway}))

    write(tiny, api_keys=[{"key": "first-key-1"}])
    read = partial(load, path, {"HEADRACE_GATEWAY__PORT": "9000"}, GivenFlags({"drain_timeout_s": 7}))
    source = ServeSource(read(), read, Path)
    assert source.read({}).gateway["port"] == 9000
    assert source.differences() == ["the configuration is as it was"]
    other = {"name": "other", "engine": {"model": str(model_folder)}, "aliases": ["o"]}
    write({**tiny, "replicas": 2}, other, api_keys=[{"key": "first-key-1"}, {"key": "second-key-2", "tenant": "b"}])
    for _ in range(2):
        fleet = source.read({})
        assert ([model.replicas for model in fleet.models], fleet.drain_timeout_s) == ([2, 1], 7)
        found = source.differences()
        assert found[:2] == [f"~ models[{model_folder.name}].replicas: 1 -> 2", "+ models[other]"]
        assert "second-key-2" not in str(found)
        assert "tenant='b'" in found[2]
    source.accept()
    source.read({})
    assert source.differences() == ["the configuration is as it was"]


def test_an_open_layout_is_decided_before_processes_are_counted(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All replicas of a file share its machine. A reload decides again."""
    path, auto = tmp_path / "headrace.yaml", {"model": str(model_folder), "device": "cpu", "tensor_parallel_size": "auto"}
    two = {"name": "two", "replicas": 2, "engine": auto}
    path.write_text(json.dumps({"models": [two, {"name": "one", "engine": {**auto, "tensor_parallel_size": 2}}]}))
    read = partial(load, path, {})
    fleet = read().fleet(Path, lambda engine, folder, replicas: replace(engine, tensor_parallel_size=replicas))
    assert [model.num_ranks for model in fleet.models] == [3, 3]
    monkeypatch.setattr(here, "memory_domains", lambda cpus: [[0, 1]])
    assert [model.num_ranks for model in ServeSource(read(), read, Path).read({}).models] == [1, 2]
    assert load(path, {"HEADRACE_MODELS__1__ENGINE__TENSOR_PARALLEL_SIZE": "auto"}).models[1].engine == read().models[0].engine


def test_a_file_with_a_fault_is_refused_and_what_holds_stays(tmp_path: Path, model_folder: Path) -> None:
    path = tmp_path / "headrace.yaml"
    path.write_text(json.dumps({"models": [{"engine": {"model": str(model_folder)}}]}))
    read = partial(load, path, {})
    source = ServeSource(read(), read, Path)
    path.write_text(json.dumps({"models": [{"engine": {"model": str(model_folder)}, "replica": 2}]}))
    with pytest.raises(ConfigError, match=r"models\[0\]\.replica: is not a known key"):
        source.read({})
    assert source.differences() == ["the configuration is as it was"]
