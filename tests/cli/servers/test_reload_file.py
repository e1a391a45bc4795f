"""Tests that no file which is empty, cut off, damaged or without some of its lines takes away by a reload what protects the server."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.cli.config import load as loading
from headrace.cli.config.load import ServeSource, load
from headrace.cli.config.sections import ServeConfig
from headrace.cli.config.yaml_files import dump_yaml, parse_yaml
from headrace.core.errors import CheckpointError, ConfigError
from headrace.fleet.config import FleetConfig, check_can_become, with_choices_of_start
from headrace.fleet.files import ReplicaFiles, gateway_content
from headrace.gateway.config import GatewayConfig, config_from, load_config
from headrace.gateway.control.protections import check_keeps_protections
from headrace.gateway.control.reload import check_change
from headrace.gateway.http.config import HttpTls
from headrace.gateway.http.tls import load_context
from headrace.gateway.ledger.config import read_properties
from headrace.gateway.upstream.foreign.session import read_key
from headrace.gateway.upstream.model_config import ForeignConfig
from headrace.machine.private_files import read_token
from headrace.policy.limits.tier import Tier, all_tiers
from headrace.text.files import read_bytes
from headrace.wire.tls.files import TlsRole, files_in, load_certificates

pytestmark = pytest.mark.pure

ENVIRONMENT = {"XDG_STATE_HOME": "/nowhere"}

FULL = """\
# A site with everything that protects it, and one line that would let it listen without keys.
allow_open: true
state: /nowhere/site
site_key: "00112233445566778899aabbccddeeff"
models:
  - name: m
    replicas: 2
    engine:
      model: headrace-tiny
      max_num_seqs: 8
  - name: far
    remote:
      model: headrace-tiny
      tls_dir: FOLDER
      token_file: FOLDER/token
      replicas:
        - name: far-0
          address: "127.0.0.1:7001"
  - name: elsewhere
    upstreams:
      - url: "https://api.example/v1"
        api_key_file: FOLDER/token
      - url: "https://other.example/v1"
        name: first
        api_key_file: FOLDER/ca.pem
      - url: "https://other.example/v1"
        name: second
        api_key_file: FOLDER/kafka.properties
      - url: "https://other.example/v1"
        name: third
        api_key_file: FOLDER/token
tiers:
  standard:
    weight: 0.5
    requests_per_minute: 60
    input_tokens_per_minute: 100000
    max_concurrent_requests: 4
  batch:
    class: batch
    daily_tokens: 1000000
    kv_share: 0.25
  gold:
    monthly_budget: 1000
    models:
      - m
  silver:
    monthly_budget: 500
    models:
      - far
  premium:
    class: premium
    max_context_tokens: 4096
prices:
  m:
    input: 1.5
    output: 2.5
  far:
    input: 1
  elsewhere:
    input: 0.5
    output: 0.5
usage:
  retention_days: 365
  kafka:
    brokers:
      - "kafka.example:9093"
    properties_file: FOLDER/kafka.properties
  clickhouse:
    url: "https://headrace@clickhouse.example:8443"
    password_file: FOLDER/token
gateway:
  host: 0.0.0.0
  port: 8443
  tls:
    certificate: FOLDER/tls.crt
    key: FOLDER/tls.key
  allowed_hosts:
    - api.example
    - localhost
  limits:
    max_requests: 16
    daily_budget: 100
    monthly_budget: 2000
  timeouts:
    request_s: 30
  cache:
    enabled: true
  store:
    url: "unix:///nowhere/redis.sock"
  sessions:
    ttl_s: 60
  api_keys:
    - sha256: "9b74c9897bac770ffc029102a200c5de8be2b1a1e0a4cbb36f1d8b2f1b0b0c7e"
      tenant: acme
      user: ada
      tier: gold
    - sha256: "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"
      tenant: nightly
      tier: batch
    - sha256: "fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9"
    - sha256: "b5bb9d8014a0f9b1d61e21e796d78dccdf1352f23cd32812f4850b878ae4944c"
      user: bob
      tier: premium
      role: reader
drain_timeout_s: 60
"""
WORD = "gateway:\n  access: open\n"


class Site:
    """A running deployment's configuration, and its file as it is read again."""

    def __init__(self, folder: Path, layout: Callable[[str], str] = str) -> None:
        """layout: writes the file's data in another form"""
        for name in ("token", "ca.pem"):
            (folder / name).write_text("word")
        (folder / "kafka.properties").write_text("security.protocol=SASL_SSL\nsasl.mechanism=PLAIN\nsasl.username=u\nsasl.password=p\n")
        for file in folder.iterdir():
            file.chmod(0o600)
        self.full = layout(FULL.replace("FOLDER", str(folder)))
        self.path = folder / "headrace.yaml"
        self.path.write_text(self.full)
        self.held = load(self.path, ENVIRONMENT)
        self.protections = protections(self.held)

    def read(self, data: bytes) -> ServeConfig:
        """The configuration that a reload of these bytes would bring into force. Raises ConfigError."""
        self.path.write_bytes(data)
        source = ServeSource(self.held, partial(load, self.path, ENVIRONMENT), Path)
        before = self.held.fleet(Path).with_site_key()
        after = with_choices_of_start(before, source.read({}))
        check_can_become(before, after, served=["m"])
        check_change(config_from(self._of_gateways(before)), config_from(self._of_gateways(after)))
        source.accept()
        return source.held

    def _of_gateways(self, fleet: FleetConfig) -> dict[str, object]:
        engines = [ReplicaFiles("r", model.name, [Path()], {"address": "unix:/nowhere/r"}) for model in fleet.models if model.replicas]
        return gateway_content(fleet, engines)

    def kept(self, data: bytes) -> str:
        """`refused` or `kept`, if a reload of these bytes leaves each value that stays as it is; else what it would change."""
        try:
            config = self.read(data)
        except ConfigError:
            return "refused"
        after = values(config)
        changed = [path for path, value in values(self.held).items() if path in after and not _is_within(after[path], value)]
        return f"changed {changed}" if changed else "kept"

    def lost(self, data: bytes) -> set[str] | None:
        """What a reload of these bytes would lose of what protects; None where it is refused."""
        try:
            config = self.read(data)
        except ConfigError:
            return None
        kept = protections(config)
        keys = {name for name in kept if name.startswith("the tenant of")}
        is_gone = {
            name
            for name in self.protections - kept
            # A key, a model or a tier of one's own may leave, with all that was said of it.
            if (name.startswith("of key ") and not any(name.split()[2] in key for key in keys))
            or (name.startswith("price ") and name.split()[1] not in {model.served_name for model in config.models})
            or (name.startswith("tls of ") and name.split()[2] not in {model.served_name for model in config.models})
            or (name.startswith("tier ") and name.split()[1] not in all_tiers(config.tiers))
            or (name.startswith("the tenant of ") and name.split()[3] not in {key.sha256 for key in config.gateway.api_keys})
        }
        assert config.models
        assert not any(model.served_name == "headrace-tiny" for model in config.models), "in the place of what was served"
        return self.protections - kept - is_gone - ({"identity"} if config.gateway.access == "open" else set())


def protections(config: ServeConfig) -> set[str]:
    """All that protects, a word for each. Written without the module that is tested, from the options themselves where they say it."""
    gateway, usage = config.gateway, config.usage
    found = {
        "identity": gateway.api_keys,
        "tls": gateway.tls,
        "hosts": gateway.allowed_hosts,
        "metrics": gateway.open_metrics == "none",
        "deadline": gateway.timeouts.request_s,
        "daily budget": gateway.limits.daily_budget,
        "monthly budget": gateway.limits.monthly_budget,
        "store": gateway.store.url == "unix:///nowhere/redis.sock",
        "sessions": gateway.sessions.ttl_s == 60,
        "retention": usage.retention_days != 90,
        "state": config.state == "/nowhere/site",
        "kafka": usage.kafka,
        "kafka's properties": usage.kafka and usage.kafka.properties_file,
        "clickhouse": usage.clickhouse,
        "clickhouse's password": usage.clickhouse and usage.clickhouse.password_file,
    }
    for key in gateway.api_keys:
        found[f"the tenant of {key.sha256} is {key.tenant}"] = True
        found |= {f"of key {key.sha256} {name}": getattr(key, name) for name in ("user", "tier")}
        found[f"of key {key.sha256} role"] = key.role == "reader"
    unlimited = [item.name for item in fields(Tier) if item.default in (None, ()) and not item.name.endswith("_ms")]
    assert len(unlimited) == 12
    for tier_name, tier in all_tiers(config.tiers).items():
        found |= {f"tier {tier_name} {name}": getattr(tier, name) for name in unlimited}
        found |= {f"tier {tier_name} low class": tier.class_ == "batch", f"tier {tier_name} weight": tier.weight != 1}
    for model_name, price in config.prices.items():
        found |= {f"price {model_name} input": price.input, f"price {model_name} output": price.output}
    found |= {f"tls of {model.served_name}": model.remote.tls_dir for model in config.models if model.remote is not None}
    return {name for name, is_there in found.items() if is_there}


def values(config: ServeConfig) -> dict[str, object]:
    """The value of everything that protects, by the key, name or address that it is about."""
    gateway = config.gateway
    found: dict[str, object] = {
        f"key {key.sha256} {name}": getattr(key, name) for key in gateway.api_keys for name in ("tenant", "user", "tier", "role")
    }
    for name, tier in all_tiers(config.tiers).items():
        found |= {f"tier {name} {item.name}": getattr(tier, item.name) for item in fields(tier) if item.default in (None, ())}
    for model in config.models:
        name, price = model.served_name, config.prices.get(model.served_name)
        found |= {f"price {name}": price, f"engine {name}": model.engine and model.engine.model}
        # Without its key or token a server refuses what is sent to it, and that of another one is not sent.
        found |= {
            f"upstream {name} {each.url} {each.model} {each.name}": each.api_key_file for each in model.upstreams if each.api_key_file
        }
        remote = model.remote.gateway_replicas() if model.remote is not None else ()
        found |= {f"engine {name} {each.name}": (each.address, each.tls_dir) for each in remote}
        found |= {f"token {name} {each.name}": each.token_file for each in remote if each.token_file}
    found |= {name: getattr(gateway, name) for name in ("tls", "store", "sessions", "host", "allowed_hosts")}
    found |= {"request_s": gateway.timeouts.request_s, "budgets": gateway.limits.budget}
    return found | {"usage": config.usage, "state": config.state, "access": gateway.access}


def _is_within(new: object, old: object) -> bool:
    """Whether a value is the same, or a list with some of the names. An empty one stands for all names."""
    return new == old or (isinstance(new, tuple) and isinstance(old, tuple) and bool(new) and set(new) <= set(old))


def reversed_yaml(text: str) -> str:
    """The same data with every mapping in the reverse order: what names an entry comes last."""
    return dump_yaml(_reversed(parse_yaml(text, "")))


def _reversed(data: object) -> object:
    if isinstance(data, dict):
        return {name: _reversed(value) for name, value in reversed(data.items())}
    return [_reversed(each) for each in data] if isinstance(data, list) else data


def json_lines(text: str) -> str:
    return json.dumps(parse_yaml(text, ""), indent=1) + "\n"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loading, "has_stored_keys", lambda *_: False)  # no store is asked
        yield Site(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module", params=[str, reversed_yaml, json_lines], ids=["yaml", "reversed", "json"])
def each_site(site: Site, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(tmp_path_factory.mktemp("site"), request.param)


def without(text: str, *begins: str) -> str:
    """The file without the lines that begin with one of these words, and what is indented below them."""
    kept, inside = [], -1
    for line in text.splitlines(keepends=True):
        indent = len(line) - len(line.lstrip())
        if inside >= 0 and indent > inside:
            continue
        inside = indent if line.lstrip().startswith(begins) else -1
        if inside < 0:
            kept.append(line)
    return "".join(kept)


def test_the_whole_file_keeps_everything(site: Site) -> None:
    assert site.lost(site.full.encode()) == set()


@pytest.mark.parametrize(
    "content", [b"", b"\n\n", b"# only a comment\n", b"null\n", b"---\n", b"--- # begun\n...\n", b"{}", b"\xef\xbb\xbf"]
)
def test_a_file_that_says_nothing_is_refused_by_name_at_a_start_too(site: Site, content: bytes) -> None:
    with pytest.raises(ConfigError, match=r"headrace\.yaml: is empty\. `headrace config init` prints"):
        site.read(content)
    with pytest.raises(ConfigError, match=r"headrace\.yaml: is empty"):
        load(site.path, ENVIRONMENT)


LOST = [
    ("api_keys:", r"gateway\.api_keys: would be gone, so that no request needs a key any more \(4 keys now\)\. .* `access: open`"),
    ("tls:", r"gateway\.tls: protects the running server and would be gone\. Write what it was"),
    ("allowed_hosts:", r"gateway\.allowed_hosts: protects"),
    ("tls_dir:", r"models\[far\]\.remote\.tls_dir of the engine far-0: protects"),
    ("monthly_budget: 2000", r"gateway\.limits\.monthly_budget: protects"),
    ("limits:", r"gateway\.limits\.daily_budget: protects .*, and gateway\.limits\.monthly_budget"),
    ("timeouts:", r"gateway\.timeouts\.request_s: protects"),
    ("kafka:", r"usage\.kafka: protects"),
    ("retention_days:", r"usage\.retention_days: protects"),
    ("state:", r"^state: cannot change while the deployment runs"),
    ("store:", r"^gateway\.store: cannot change while the deployment runs"),
    ("sessions:", r"^gateway\.sessions: cannot change while the deployment runs"),
    ("usage:", r"usage\.kafka: protects .*, and usage\.clickhouse"),
    ("standard:", r"tiers\.standard\.requests_per_minute: protects .*max_concurrent_requests"),
    ("daily_tokens:", r"tiers\.batch\.daily_tokens: protects"),
    ("class: batch", r"tiers\.batch\.class: protects"),
    ("weight: 0.5", r"tiers\.standard\.weight: protects"),
    ("tenant: acme", r"api_keys\[key-9b74c9897bac\]\.tenant: protects"),
    ("tier: batch", r"api_keys\[key-2c26b46b68ff\]\.tier: protects"),
    ("user: ada", r"api_keys\[key-9b74c9897bac\]\.user: protects"),
    ("role: reader", r"api_keys\[key-b5bb9d8014a0\]\.role: protects"),
    ("output: 2.5", r"prices\.m\.output: protects"),
]


@pytest.mark.parametrize(("line", "message"), LOST, ids=[line for line, _ in LOST])
def test_a_file_without_a_protection_is_refused_with_what_would_be_lost(site: Site, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        site.read(without(site.full, line).encode())


def test_a_file_that_lost_its_models_does_not_serve_the_bundled_one_instead(site: Site) -> None:
    text = site.full[: site.full.index("models:\n")] + site.full[site.full.index("usage:\n") :]
    with pytest.raises(
        ConfigError, match=r"^models: would be headrace-tiny alone, as in a file without models, and elsewhere, far, m gone"
    ):
        site.read(without(text, "daily_budget", "monthly_budget", "tier: gold").encode())


@pytest.mark.parametrize("keys", ["api_keys: []", "api_keys:\n    []", "api_keys: !!seq []"])
def test_an_empty_list_of_keys_is_not_the_word(site: Site, keys: str) -> None:
    text = without(site.full, "api_keys:").replace("gateway:\n", f"gateway:\n  {keys}\n")
    with pytest.raises(ConfigError, match=r"^gateway\.api_keys: would be gone"):
        site.read(text.encode())


def test_leave_to_listen_without_keys_is_not_the_word_either(site: Site) -> None:
    assert "allow_open: true" in site.full
    assert site.lost(without(site.full, "api_keys:").encode()) is None
    with pytest.raises(ConfigError, match=r"^gateway\.host: 0\.0\.0\.0 can be reached from other machines and there is no API key"):
        site.read(without(site.full, "api_keys:", "allow_open").encode())


def test_the_word_gives_up_the_keys_and_nothing_else(site: Site) -> None:
    text = without(site.full, "api_keys:").replace("gateway:\n", WORD)
    assert site.read(text.encode()).gateway.api_keys == ()
    with pytest.raises(ConfigError, match=r"^gateway\.tls: protects"):
        site.read(without(text, "tls:").encode())


def test_the_word_is_refused_beside_keys_so_that_no_lost_line_makes_it_true(site: Site) -> None:
    with pytest.raises(ConfigError, match=r"^gateway\.access: is open beside api_keys\. Leave out one"):
        site.read(site.full.replace("gateway:\n", WORD).encode())


def test_the_word_is_refused_where_the_store_has_keys(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_stored_keys", lambda *_: True)
    with pytest.raises(ConfigError, match=r"^gateway\.access: is open, and the store has API keys"):
        site.read(without(site.full, "api_keys:").replace("gateway:\n", WORD).encode())


def test_keys_may_move_into_the_store(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "has_stored_keys", lambda *_: True)
    assert site.read(without(site.full, "api_keys:").encode()).gateway.api_keys == ()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("9b74c9897bac770f", "0074c9897bac770f"),  # another key in the place of one
        ('    - sha256: "fcde2b2edba56bf408601fb721fe9b5c338d10ee429ea04fae5511b68fbf8fb9"\n', ""),
        (
            '    - sha256: "2c26b46b68ffc68ff99b453c1d30413413422d706483bfa0f98a5e886266e7ae"\n      tenant: nightly\n      tier: batch\n',
            "",
        ),
        ("tier: gold", "tier: premium"),
        ("user: ada", "user: bob"),
        ("requests_per_minute: 60", "requests_per_minute: 600"),
        ("monthly_budget: 2000", "monthly_budget: 20000"),
        ("output: 2.5", "output: 0.1"),
        ("class: batch", "class: premium"),
        ("weight: 0.5", "weight: 4"),
        ("    class: premium\n", ""),  # it falls
        ("api.example\n    - localhost", "www.example"),
        ("    max_requests: 16\n", ""),  # there is a bound without it
        ("  - name: far\n", "  - name: near\n"),
        ("max_num_seqs: 8", "max_num_seqs: 16"),
    ],
)
def test_what_protects_may_be_changed_and_single_keys_may_come_and_go(site: Site, old: str, new: str) -> None:
    text = site.full
    if "name: near" in new:  # a model leaves with its price, and another comes
        text = text.replace("  far:\n    input: 1\n", "  near:\n    input: 1\n")
    assert old in text
    site.read(text.replace(old, new).encode())


def test_a_key_does_not_become_one_of_another_tenant(site: Site) -> None:
    """Four lines are lost, and the first key would read what the tenant nightly has stored."""
    first, last = site.full.index("      tenant: acme"), site.full.index("      tenant: nightly")
    with pytest.raises(ConfigError, match=r"^gateway\.api_keys\[key-9b74c9897bac\]\.tenant"):
        site.read((site.full[:first] + site.full[last:]).encode())


MELTED = [
    (
        "      tier: gold",
        "      tier: batch",
        r".*\[key-9b74c9897bac\]\.tier: would be taken from .*\[key-2c26b46b68ff\], which",
    ),
    (
        '    - sha256: "b5bb',
        "      user: bob",
        r".*\[key-fcde2b2edba5\]\.(user|tier|role): would be taken from .*\[key-b5bb9d8014a0\]",
    ),
    (
        "    monthly_budget: 1000",
        "    monthly_budget: 500",
        r"tiers\.gold(\.monthly_budget)?: would be taken from tiers\.silver",
    ),
    ("  silver:", "      - far\n  premium", r"tiers\.gold: would be taken from tiers\.silver, which goes in the same reload"),
    ("  premium:", "prices:", r"tiers\.premium: protects the running server and would be gone"),
    (
        "        api_key_file: FOLDER/token\n      - url",
        "        api_key_file: FOLDER/kafka.properties",
        r"models\[elsewhere\]\.upstreams\[https://api\.example/v1\]\.api_key_file: would be taken from .*v1  second\], which",
    ),
    (
        "        api_key_file: FOLDER/kafka.properties",
        "        api_key_file: FOLDER/token\ntiers",
        r"models\[elsewhere\]\.upstreams\[https://other\.example/v1  second\]\.api_key_file: would be taken from .*v1  third\], which",
    ),
]


@pytest.mark.parametrize(("first", "behind", "message"), MELTED)
def test_two_entries_do_not_become_one_where_lines_are_lost(site: Site, first: str, behind: str, message: str) -> None:
    """The lines from `first` until `behind` are lost: what stays would have the rights of what went."""
    begin, end = (site.full.index(line.replace("FOLDER", str(site.path.parent))) for line in (first, behind))
    assert begin < end
    text = site.full[:begin] + site.full[end:]
    with pytest.raises(ConfigError, match=rf"^{message}.*"):
        site.read(text.encode())


def test_a_key_moves_to_the_tier_of_one_that_goes_in_two_reloads(site: Site) -> None:
    moved = site.full.replace("      tier: gold\n", "      tier: batch\n")
    both = without(moved, '- sha256: "2c26')
    with pytest.raises(ConfigError, match=r"which goes in the same reload, as where lines are lost\. If that is meant, reload twice:"):
        site.read(both.encode())
    before, after = (gateway_of(text, site) for text in (moved, both))
    check_keeps_protections(site.held.gateway_before_start(), before, has_stored_keys=False)
    check_keeps_protections(before, after, has_stored_keys=False)


def gateway_of(text: str, site: Site) -> GatewayConfig:
    site.path.write_text(text)
    return load(site.path, ENVIRONMENT).gateway_before_start()


def test_a_tier_and_a_key_may_be_renamed_and_rotated_at_once(site: Site) -> None:
    renamed = site.full.replace("  gold:", "  platinum:").replace("tier: gold", "tier: platinum")
    site.read(renamed.replace("9b74c9897bac770f", "0074c9897bac770f").encode())


def test_a_key_goes_to_no_other_address_where_the_name_of_the_model_there_is_lost_too() -> None:
    def served_by(*servers: dict[str, str]) -> GatewayConfig:
        return config_from({"models": [{"name": "m", "upstreams": list(servers)}]})

    one, other = ({"url": f"http://{host}/v1", "model": "x", "api_key_env": f"KEY_{host}"} for host in "ab")
    with pytest.raises(ConfigError, match=r"upstreams\[http://a/v1\]\.api_key_env: would be taken from"):
        check_keeps_protections(
            served_by(one, other), served_by({"url": one["url"], "api_key_env": other["api_key_env"]}), has_stored_keys=False
        )


def priced(*models: tuple[str, list[str], str], **prices: float) -> GatewayConfig:
    """Models by name, aliases and what their server calls them."""
    found = [{"name": name, "aliases": aliases, "upstreams": [{"url": "http://h/v1", "model": model}]} for name, aliases, model in models]
    return config_from({"models": found, "prices": {name: {"input": price} for name, price in prices.items()}})


@pytest.mark.parametrize(
    ("after", "is_kept"),
    [
        (priced(("n", ["m"], "other")), False),
        (priced(("n", ["old"], "other")), False),
        (priced(("n", [], "x")), False),
        (priced(("free", ["m"], "y")), False),
        (priced(("n", ["m"], "x"), n=0.5), True),
        (priced(("free", [], "y")), True),
        (priced(("free", [], "y"), ("new", [], "z")), True),
        (priced(("m", ["old"], "x"), ("again", [], "x"), m=1), True),
    ],
)
def test_a_model_keeps_its_price_under_another_name(after: GatewayConfig, is_kept: bool) -> None:
    before = priced(("m", ["old"], "x"), ("free", [], "y"), m=1)
    if is_kept:
        check_keeps_protections(before, after, has_stored_keys=False)
        return
    with pytest.raises(ConfigError, match=r"^prices\.(n|free)\.input: protects the running server and would be gone"):
        check_keeps_protections(before, after, has_stored_keys=False)


# -- every prefix, every deletion, every damage --------------------------------------------------------------------------------------------


def test_every_prefix_in_lines_is_refused_or_keeps_every_protection(site: Site) -> None:
    lines = site.full.splitlines(keepends=True)
    outcomes = Counter(_word(site.lost("".join(lines[:number]).encode())) for number in range(len(lines)))
    assert set(outcomes) <= {"refused", "kept"}, outcomes


@settings(max_examples=100)
@given(data=st.data())
def test_any_deletion_of_lines_is_refused_or_leaves_each_value_that_stays_as_it_is(each_site: Site, data: st.DataObject) -> None:
    """One to three runs of lines go: what is left of a key, a tier, a price or an engine has nothing of another one."""
    lines = each_site.full.splitlines(keepends=True)
    run = st.builds(_run, st.integers(0, len(lines)), st.integers(1, 12))
    gone = set[int]().union(*data.draw(st.lists(run, min_size=1, max_size=3)))
    left = "".join(line for number, line in enumerate(lines) if number not in gone)
    assert each_site.kept(left.encode()) in ("refused", "kept")


def test_a_file_without_any_one_line_is_refused_or_keeps_every_protection(site: Site) -> None:
    lines = site.full.splitlines(keepends=True)
    outcomes = Counter(_word(site.lost("".join(lines[:number] + lines[number + 1 :]).encode())) for number in range(len(lines)))
    assert set(outcomes) == {"refused", "kept"}, outcomes


@settings(max_examples=150)
@given(data=st.data())
def test_any_prefix_and_any_deletion_of_lines_is_refused_or_keeps_every_protection(site: Site, data: st.DataObject) -> None:
    lines = site.full.splitlines(keepends=True)
    gone = data.draw(st.sets(st.integers(0, len(lines) - 1), max_size=12) | st.builds(_run, st.integers(0, len(lines)), st.integers(1, 30)))
    left = "".join(line for number, line in enumerate(lines) if number not in gone)
    end = data.draw(st.just(len(left)) | st.integers(0, len(left)))
    assert not site.lost(left[:end].encode())


def _run(first: int, length: int) -> set[int]:
    return set(range(first, first + length))


def _word(lost: set[str] | None) -> str:
    return "refused" if lost is None else f"lost {sorted(lost)}" if lost else "kept"


TOKENS = [
    *("null", "[]", "{}", "~", "true", "-1", "0", "1e400", "9" * 200, "open", "access: open", "api_keys: []", "gateway: null", "tiers: {}"),
    *(
        "&a ",
        "*a",
        "<<: *a",
        "!!python/object:os.system ",
        "!!binary ",
        "? ",
        "- ",
        ": ",
        "---\n",
        "...\n",
        "%YAML 1.1\n",
        "\t",
        "|\n",
        ">\n",
    ),
    *('"', "'", "{", "}", "[", "]", ",", "#", "\x00", "\ufeff", "\u2028", "\u0085", "\U0001f600", "a: &a [x, x]\n", "[" * 40, "{a: " * 40),
]


def damaged(text: str, draw: random.Random) -> bytes:
    """The file after one to three accidents: lines lost, doubled, moved or indented anew, a cut, other digits, odd words and bytes."""
    data = text.encode()
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        lines = data.splitlines(keepends=True) or [b"\n"]
        where, line, word = draw.randrange(len(data) + 1), draw.randrange(len(lines)), draw.choice(TOKENS).encode()
        before, after = lines[:line], lines[line + 1 :]
        data = draw.choice(
            [
                data[:where],
                b"".join(before + after),
                b"".join(before + after[draw.randrange(5) :]),
                b"".join([*before, *lines[line : line + 1] * 2, *after]),
                b"".join([*before, *after[:3], lines[line], *after[3:]]),
                b"".join([*before, lines[line].lstrip(), *after]),
                b"".join([*before, lines[line].split(b":")[0], b": ", word, b"\n", *after]),
                b"".join([*before, re.sub(rb"[0-9]", b"%d" % draw.randrange(1, 10), lines[line]), *after]),
                data[:where] + word + data[where:],
                data[:where] + bytes([draw.randrange(256)]) + data[where + 1 :],
                data[:where] + b"\0" * draw.randint(1, 64) + data[where:],
            ]
        )
    return data


def fuzz(site: Site, num_files: int, seed: int) -> Counter[str]:
    """Read damaged files as a reload does. Only ConfigError is raised, and what is accepted lost nothing."""
    draw = random.Random(seed)
    outcomes: Counter[str] = Counter()
    for _ in range(num_files):
        data = damaged(site.full, draw)
        lost = site.lost(data)
        assert not lost, (lost, data)
        outcomes["refused" if lost is None else "accepted, nothing lost"] += 1
    return outcomes


def test_damaged_files_are_refused_or_lose_nothing(site: Site) -> None:
    outcomes = fuzz(site, 300, seed=1)
    assert len(outcomes) == 2, f"both outcomes are drawn, whatever the length of the folder's name in the file: {outcomes}"


@pytest.mark.slow
def test_three_thousand_damaged_files_are_refused_or_lose_nothing(site: Site, capfd: pytest.CaptureFixture[str]) -> None:
    outcomes = fuzz(site, 3000, seed=2)
    with capfd.disabled():
        print(f"\n  3,000 files: {dict(outcomes)}")
    assert outcomes.total() == 3000


# -- files that are none ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- models\n- gateway\n", "is not a mapping of names to values"),
        (b"models: []\n---\ngateway: {}\n", r"expected a single document|but found another document"),
        (b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n", r"aliases \(\*name\) are not allowed"),
        (b"drain_timeout_s: 5\ndrain_timeout_s: 6\n", "drain_timeout_s is given twice, first on line 1"),
        (b"gateway: {host: \xff}\n", "cannot be read .not UTF-8."),
        (b"gateway: null\n", "gateway: expected object, got null"),
        (b"tenants: {}\n", "tenants: is not a known key"),
        (b"[" * 100_000, "it is nested too deeply"),
        (b"{a: " * 5_000, "it is nested too deeply"),
        (b"- " * 100_000, "it is nested too deeply"),
    ],
)
def test_what_is_no_configuration_is_refused_by_name(site: Site, content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        site.read(content)


def _fifo(path: Path) -> None:
    os.mkfifo(path)


def _link_to_fifo(path: Path) -> None:
    fifo = path.with_suffix(".fifo")
    os.mkfifo(fifo)
    path.symlink_to(fifo)


def _loop(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_fifo, r"cannot be read \(a FIFO, not a regular file\)"),
        (Path.mkdir, r"cannot be read \(a directory, not a regular file\)"),
        (lambda path: path.symlink_to("/dev/zero"), r"cannot be read \(a device, not a regular file\)"),
        (_link_to_fifo, r"cannot be read \(a FIFO, not a regular file\)"),
        (_loop, r"cannot be read \(Too many levels of symbolic links\)"),
        (lambda path: None, r"cannot be read \(No such file or directory\)"),
    ],
    ids=["FIFO", "folder", "device", "link to a FIFO", "loop of links", "nothing"],
)
def test_a_path_that_is_no_file_is_refused_and_the_right_file_is_read_again(site: Site, make: Callable[[Path], None], message: str) -> None:
    """A FIFO kept every later reload waiting, and the end of the process too."""
    source = ServeSource(site.held, partial(load, site.path, ENVIRONMENT), Path)
    site.path.unlink()
    make(site.path)
    try:
        with pytest.raises(ConfigError, match=message):
            source.read({})
    finally:
        if site.path.is_dir():
            site.path.rmdir()
        site.path.unlink(missing_ok=True)
        site.path.write_text(site.full)
    source.read({})
    assert source.differences() == ["the configuration is as it was"]


def _key_and(folder: Path, *names: str) -> list[str]:
    """Paths in the folder, of a private key too."""
    (folder / "tls.key").touch(0o600)
    return [str(folder / name) for name in (*names, "tls.key")]


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "token": ("is not a file", lambda folder: read_token("token_file", str(folder / "token"))),
    "kafka.properties": ("is not a file", lambda folder: read_properties("usage", str(folder / "kafka.properties"))),
    "api.key": ("a FIFO", lambda folder: read_key(ForeignConfig(url="http://h/v1", api_key_file=str(folder / "api.key")))),
    "tls.crt": (
        "a FIFO",
        lambda folder: load_context(HttpTls(**dict(zip(("certificate", "key"), _key_and(folder, "tls.crt"), strict=True)))),
    ),
    "ca.crt": ("a FIFO", lambda folder: _key_and(folder) and load_certificates(files_in(folder), TlsRole.GATEWAY)),
    "gateway.json": ("a FIFO", lambda folder: load_config(folder / "gateway.json")),
    "tokenizer.json": ("a FIFO", lambda folder: read_bytes(folder / "tokenizer.json")),
}


@pytest.mark.parametrize("name", READERS)
def test_every_file_that_a_configuration_names_is_refused_where_it_is_none(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name, 0o600)
    words, read = READERS[name]
    with pytest.raises((ConfigError, CheckpointError), match=f"{re.escape(name)}.*{words}"):
        read(tmp_path)


def test_twenty_thousand_keys_are_compared_once_each(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was compared with each, which took minutes. Counted, so that a busy machine fails nothing."""
    keys = tuple(replace(site.held.gateway.api_keys[0], sha256=f"{number:064x}") for number in range(4000))
    held = replace(site.held, gateway=replace(site.held.gateway, api_keys=keys))
    changed = replace(held, gateway=replace(held.gateway, api_keys=keys[1:]))
    num_compared = 0
    kind = type(keys[0])
    equal = kind.__eq__

    def counted(one: object, other: object) -> bool:
        nonlocal num_compared
        num_compared += 1
        return bool(equal(one, other))

    monkeypatch.setattr(kind, "__eq__", counted)
    source = ServeSource(held, lambda: changed, Path)
    source.read({})
    assert len(source.differences()) == 1
    assert num_compared < 3 * len(keys)


def test_only_defaults_are_left_unsaid(site: Site) -> None:
    """The full file sets each limit that has no default, so that a new one is added here and to what a reload keeps."""
    config = site.held.gateway
    for part in (config.limits, config.timeouts):
        unset = [
            item.name for item in fields(part) if item.default is not MISSING and item.default is None and not getattr(part, item.name)
        ]
        assert unset in ([], ["max_tenant_share", "max_prompt_bytes"]), "these two have defaults in words"
