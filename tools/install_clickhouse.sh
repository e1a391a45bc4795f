#!/usr/bin/env bash
# Installs Debian's ClickHouse server for tests/gateway/ledger/, where none is installed yet. Needs root and Debian or Ubuntu.
# The tests start a server of their own on a loopback port; the service of the package is not needed and not started.
set -euo pipefail
if command -v clickhouse-server > /dev/null; then
  exit 0
fi
apt-get update --quiet
policy=/usr/sbin/policy-rc.d  # Debian's way not to start a service that is installed. Images of containers often have one, which stays
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' > "$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends clickhouse-server
dpkg-query --show clickhouse-server
