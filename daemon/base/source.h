/*
 * Where a connection comes from, as far as one attacker reaches: an address of IPv4 ("10.88.0.2"), a network of IPv6
 * ("2001:db8:0:1::/64"). One machine may have many connections, names and ports, and has but one source.
 */
#pragma once

#include <sys/socket.h>

#define SOURCE_MAX 48

/* "" for what has no address. */
void source_text(const struct sockaddr_storage *address, char ret_source[SOURCE_MAX]);
