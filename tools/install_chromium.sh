#!/usr/bin/env bash
# Installs Debian's Chromium for tests/e2e/test_browser.py, where it is not installed yet. Needs root and a Debian or Ubuntu that packages it.
set -euo pipefail
if command -v chromium > /dev/null; then
  exit 0
fi
apt-get update --quiet
DEBIAN_FRONTEND=noninteractive apt-get install --yes --quiet --no-install-recommends chromium
chromium --version
