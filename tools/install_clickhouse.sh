#!/usr/bin/env bash
# Installs Debian's ClickHouse server for tests/gateway/ledger/, where none is installed yet. Needs root and Debian or Ubuntu.
# The tests start a server of their own on a loopback port; the service of the package is not needed and not started.
set -euo pipefail
if command -v clickhouse-server > /dev/null; then
  exit 0
fi
apt-get update --quiet
printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d  # Debian's way not to start a service that is installed
chmod +x /usr/sbin/policy-rc.d
trap 'rm -f /usr/sbin/policy-rc.d' EXIT
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends clickhouse-server
dpkg-query --show clickhouse-server
