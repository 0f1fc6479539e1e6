#!/usr/bin/env bash
# unpack.sh FOLDER SUITE [PACKAGE...]: FOLDER/root, another Debian release unpacked (not installed) from its .deb files: enough
# for the project's tests on SLURM, and PACKAGES. As root; 75 MB from this machine's own mirror. Prints the versions of what
# matters.
set -euo pipefail
folder=$(mkdir -p "$1" && cd "$1" && pwd)
suite=$2
shift 2
packages=(base-files base-passwd libc-bin dash bash coreutils util-linux mount procps grep sed findutils mawk hostname
  slurmctld slurmd slurm-client munge python3 libssl3t64 libsqlite3-0 libreadline8t64 libbz2-1.0 libffi8 "$@")
mkdir -p "$folder"/{lists/partial,cache/archives/partial,preferences,root}

mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null || true; } |
  awk '/^(URIs:|deb) / && /debian/ && !/security/ && match($0, /https?:[^ ]+/) && !n++ {print substr($0, RSTART, RLENGTH)}')
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} $suite main" > "$folder/sources.list"
: > "$folder/status"
options=(-qq -o Acquire::Retries=3 -o APT::Sandbox::User=root -o Debug::NoLocking=1
  -o "Dir::Etc::SourceList=$folder/sources.list" -o "Dir::Etc::SourceParts=$folder/preferences"
  -o "Dir::Etc::PreferencesParts=$folder/preferences" -o "Dir::State::Lists=$folder/lists"
  -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache")
apt-get "${options[@]}" update
apt-get "${options[@]}" -y --no-install-recommends --download-only install "${packages[@]}"
for package in "$folder"/cache/archives/*.deb; do
  dpkg-deb -x "$package" "$folder/root"
  case ${package##*/} in
    slurmctld_* | apptainer_* | libc6_*) dpkg-deb -W "$package" ;;
  esac
done
rm -r "$folder/cache" "$folder/lists"

# What the packages' own scripts would have done, as far as it is missed.
cd "$folder/root"
mkdir -p tmp root run oldroot var/lib/dpkg
chmod 1777 tmp
cp /etc/passwd /etc/group etc/
cp -L --remove-destination /etc/localtime etc/localtime 2> /dev/null || : > etc/localtime # Apptainer does not start without it
[ -e usr/bin/awk ] || ln -s mawk usr/bin/awk
[ -e usr/bin/sh ] || ln -s dash usr/bin/sh
for file in usr/sbin/*-wlm usr/bin/*-wlm; do # as update-alternatives links them
  if [ -e "$file" ] && [ ! -e "${file%-wlm}" ]; then ln -s "$(basename "$file")" "${file%-wlm}"; fi
done
# cluster.sh asks dpkg-query whether its packages are there.
printf '#!/bin/sh\necho "install ok installed"\n' > usr/bin/dpkg-query
chmod 755 usr/bin/dpkg-query
# A container of root's keeps all of root's capabilities unless told otherwise, and a machine may not have them all.
[ ! -e etc/apptainer/apptainer.conf ] ||
  sed -i 's/^root default capabilities.*/root default capabilities = no/' etc/apptainer/apptainer.conf
