#!/usr/bin/env bash
# unpack.sh FOLDER SUITE NAME PACKAGE...: FOLDER/SUITE/NAME, a root file system of another Debian release with those
# packages and what they need, unpacked (not installed) from their .deb files, as root. FOLDER keeps lists and packages:
# the mirror is asked once an hour for what is new, and what is unpacked already stays as it is. Where the mirror does not
# answer, what is there is used. Prints each package and its version, and at last when the mirror had them.
set -euo pipefail
folder=$(mkdir -p "$1/$2" && cd "$1/$2" && pwd)
suite=$2 name=$3
shift 3
exec 9> "$folder/lock"
flock 9 # another checkout may be at it
mkdir -p "$folder"/{lists/partial,cache/archives/partial,preferences}

mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2> /dev/null || true; } |
  awk '/^(URIs:|deb) / && /debian/ && !/security/ && match($0, /https?:[^ ]+/) && !n++ {print substr($0, RSTART, RLENGTH)}')
keys=/usr/share/keyrings/debian-archive-keyring.gpg
echo "deb [signed-by=$keys] ${mirror:-http://deb.debian.org/debian} $suite main" > "$folder/sources.list"
: > "$folder/status"
options=(-qq -o Acquire::Retries=3 -o APT::Sandbox::User=root -o Debug::NoLocking=1
  -o APT::Update::Error-Mode=any -o APT::Keep-Downloaded-Packages=true
  -o "Dir::Etc::SourceList=$folder/sources.list" -o "Dir::Etc::SourceParts=$folder/preferences"
  -o "Dir::Etc::PreferencesParts=$folder/preferences" -o "Dir::State::Lists=$folder/lists"
  -o "Dir::State::status=$folder/status" -o "Dir::Cache=$folder/cache")
if [ -z "$(find "$folder/updated" -mmin -60 2> /dev/null)" ]; then
  if apt-get "${options[@]}" update; then touch "$folder/updated"; else [ -e "$folder/updated" ]; fi
fi
install=(-y --no-install-recommends install "$@")
if [ "$*" = "$(cat "$folder/$name.asked" 2> /dev/null)" ] && [ "$folder/$name.packages" -nt "$folder/updated" ]; then
  wanted=$(cat "$folder/$name.packages")
else # as if none had been fetched: apt-get names only those that are missing
  wanted=$(apt-get "${options[@]}" -o "Dir::Cache::archives=$folder/preferences" --print-uris "${install[@]}" |
    awk '{print $2}' | sort)
fi

if [ "$wanted" != "$(cat "$folder/$name.packages" 2> /dev/null)" ]; then
  rm -rf "${folder:?}/$name" "$folder/$name.packages"
  apt-get "${options[@]}" --download-only "${install[@]}"
  mkdir "$folder/$name"
  for package in $wanted; do dpkg-deb -x "$folder/cache/archives/$package" "$folder/$name"; done

  # What the packages' own scripts would have done, as far as it is missed.
  cd "$folder/$name"
  mkdir -p tmp root run oldroot var/lib/dpkg
  chmod 1777 tmp
  chmod 755 root # everyone may run an interpreter that lies in it
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
fi
echo "$wanted" > "$folder/$name.packages"
echo "$*" > "$folder/$name.asked"
sed 's/_[^_]*\.deb$//; s/%3a/:/; s/_/ /' "$folder/$name.packages"
echo "as of $(date -u -r "$folder/updated" +%Y-%m-%dT%H:%MZ)"
