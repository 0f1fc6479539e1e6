#!/usr/bin/env bash
# enter.sh ROOT PLACE[:PLACE...] COMMAND...: the command with ROOT as its root file system, and these files and folders of
# this machine at their own places in it; the working directory is one of them. In a mount namespace of its own and by pivot_root: in a chroot no user namespace,
# and so no Apptainer, can be made. Network, processes and users are this machine's: ports that a cluster claims stay claimed.
exec unshare --mount --propagation private bash -c '
set -e
root=$1 places=$2 here=$PWD
shift 2
mount --bind "$root" "$root"
cd "$root"
mkdir -p proc dev sys oldroot
IFS=:
for place in /proc /dev /sys $places; do
  if [ -d "$place" ]; then mkdir -p "$root$place"; else mkdir -p "$root${place%/*}"; : >>"$root$place"; fi
  mount --rbind "$place" "$root$place"
done
unset IFS
cp /etc/hosts /etc/hostname /etc/resolv.conf etc/
pivot_root . oldroot
cd /
umount -l /oldroot
cd "$here"
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TMPDIR=/tmp LC_ALL=C
unset SLURM_CONF
exec "$@"' enter "$@"
