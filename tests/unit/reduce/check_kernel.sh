#!/bin/sh
# One set of kernels, by name: on this processor where it has the instructions, else under qemu-user where that has them. Skipped, with
# the reason, where neither does.
#
#   check_kernel.sh KERNEL REDUCE_PIPE TEST_REDUCE [TEST...]
set -eu
kernel=$1 pipe=$2 program=$3
shift 3
export BPS_TEST_KERNEL="$kernel"

if "$pipe" | grep -qx "$kernel"; then
	exec "$program" "$@"
fi
if ! command -v qemu-x86_64 >/dev/null; then
	echo "SKIP $kernel: this processor does not have $kernel, and there is no qemu-x86_64 (Debian: qemu-user)"
	exit 77
fi
if ! qemu-x86_64 -cpu max "$pipe" 2>/dev/null | grep -qx "$kernel"; then
	echo "SKIP $kernel: neither this processor nor qemu's has $kernel"
	exit 77
fi
# Not the exhaustive tests, as in check_neon.sh.
# shellcheck disable=SC2046 # names of tests are words
[ $# -gt 0 ] || set -- $("$program" --list | grep -v -e ^every_ -e larger_than_the_caches)
BPS_TEST_TIMEOUT_S=240 exec qemu-x86_64 -cpu max "$program" "$@"
