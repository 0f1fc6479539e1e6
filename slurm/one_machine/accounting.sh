# slurmdbd with MariaDB behind it, for the full `sacct`. Sourced by cluster.sh.
# shellcheck shell=bash

# Reached by its unix socket alone, in a directory that only this user may enter: so it needs no password
# and no port. libmariadb, which slurmdbd uses for the host "localhost", takes the socket from this variable.
export MYSQL_UNIX_PORT=$DIR/mysql/socket

start_accounting() {
  start_database
  slurmdbd < /dev/null > "$DIR/log/slurmdbd.out" 2>&1 || die_with_logs "slurmdbd did not start"
  wait_for "$TIMEOUT_SECONDS" "slurmdbd answers" sacctmgr -n show cluster || die_with_logs "slurmdbd does not answer"
  # Without these associations AccountingStorageEnforce would refuse every job.
  printf '%s\n' "add cluster llmlaunch" "add account research description=training organization=local" \
    "add qos high priority=10" "add user $(id -un) account=research" "modify user $(id -un) set qos+=high" quit |
    sacctmgr -i > "$DIR/log/sacctmgr.log" 2>&1 || true
  sacctmgr -n show user "$(id -un)" format=user | grep -q . || die_with_logs "sacctmgr could not add this user"
}

start_database() {
  local data=$DIR/mysql options tables
  # MariaDB names temporary tables by its process id, and clusters in namespaces of their own may have the same one.
  mkdir -m 700 "$data" "$data.tmp"
  tables=$(system_tables) || die_with_logs "MariaDB's system tables are not in /usr/share; is mariadb-server whole?"
  # What it holds is thrown away with the cluster: durability off, which makes it start several times faster.
  options=(--no-defaults --datadir="$data" --tmpdir="$data.tmp" --lc-messages-dir="${tables%/*}"
    --innodb-log-file-size=4M --innodb-buffer-pool-size=32M --innodb-flush-log-at-trx-commit=0 --innodb-doublewrite=0
    --innodb-flush-method=nosync --sync-binlog=0)
  [ "$(id -u)" != 0 ] || options+=(--user=root)
  database_statements "$tables" | mariadbd "${options[@]}" --bootstrap > "$DIR/log/mysql-bootstrap.log" 2>&1 ||
    die_with_logs "MariaDB could not lay out its tables"
  setsid mariadbd "${options[@]}" --socket="$MYSQL_UNIX_PORT" --skip-networking --skip-name-resolve \
    --performance-schema=off --pid-file="$DIR/run/mariadbd.pid" < /dev/null > "$DIR/log/mysql.log" 2>&1 &
  wait_for "$TIMEOUT_SECONDS" "MariaDB answers" mariadb --no-defaults -u root -e 'select 1' ||
    die_with_logs "MariaDB did not start"
}

# How the files that lay out MariaDB's tables begin: named after MySQL up to 10.11, as Debian 12 has it, and after itself
# from 11 on.
system_tables() {
  local tables
  for tables in /usr/share/mariadb/mariadb /usr/share/mysql/mysql; do
    [ ! -e "${tables}_system_tables.sql" ] || { echo "$tables" && return; }
  done
  return 1
}

# What mariadb-install-db would do, in one go; --bootstrap wants one statement a line.
database_statements() { # TABLES
  echo "create database mysql;"
  echo "use mysql;"
  cat "$1_system_tables.sql" "$1_system_tables_data.sql"
  echo "create database slurm_acct;"
}
