# The Debian packages, without a trace outside them. Sourced by cluster.sh.
# shellcheck shell=bash

# `slurmdbd` alone, without its recommended packages, lacks the plugin that speaks to MariaDB: named here.
wanted_packages() {
  echo slurmctld slurmd slurm-client munge
  [ "$ACCOUNTING" = 0 ] || echo slurmdbd slurm-wlm-mysql-plugin mariadb-server
}

missing_packages() {
  local package
  for package in $(wanted_packages); do
    dpkg-query -W -f='${Status}' "$package" 2> /dev/null | grep -q 'ok installed' || echo "$package"
  done
}

require_packages() {
  local missing
  missing=$(missing_packages | tr '\n' ' ')
  [ -n "$missing" ] || return 0
  [ "$(id -u)" = 0 ] || die "packages are missing; as root: apt-get install --no-install-recommends $missing"
  install_packages
}

# apt-get with what an unattended machine needs: no questions, and patience with another apt-get.
apt_get() {
  DEBIAN_FRONTEND=noninteractive apt-get -qq -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 "$@" 2>&1
}

install_packages() {
  local missing words
  [ -n "$(missing_packages)" ] || return 0
  [ "$(id -u)" = 0 ] || require_packages
  # One at a time, also between checkouts: the second must not lose the first one's policy-rc.d half-way.
  exec 9< "$(command -v apt-get)"
  flock 9
  trap remove_policy EXIT
  lay_policy
  mapfile -t missing < <(missing_packages)
  say "installing ${missing[*]:-nothing more}"
  if [ "${#missing[@]}" -gt 0 ]; then
    words=$(apt_get install --no-install-recommends "${missing[@]}") ||
      { apt_get update > /dev/null && words=$(apt_get install --no-install-recommends "${missing[@]}"); } ||
      die "apt-get failed: $(tail -n 5 <<< "$words")"
  fi
  remove_policy
  trap - EXIT
  exec 9<&-
}

# Debian starts a package's daemons when it installs it, unless /usr/sbin/policy-rc.d says no.
POLICY=/usr/sbin/policy-rc.d
POLICY_LAID=0

lay_policy() {
  [ ! -e "$POLICY" ] || return 0
  printf '#!/bin/sh\nexit 101\n' > "$POLICY"
  chmod 755 "$POLICY"
  POLICY_LAID=1
}

remove_policy() {
  [ "$POLICY_LAID" = 0 ] || rm -f "$POLICY"
  POLICY_LAID=0
}
