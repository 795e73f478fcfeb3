/*
 * Where a connection comes from, as what may be one attacker's: an address of IPv4 ("10.88.0.2"), a network of IPv6
 * ("2001:db8:0:1::/64"). Who is there may have many connections, names and numbers, and has but one of these.
 */
#pragma once

#include <sys/socket.h>

#define SOURCE_MAX 48

/* "" for what has no address. */
void source_text(const struct sockaddr_storage *address, char ret_source[SOURCE_MAX]);
/* Of a connected socket. */
void source_of(int fd, char ret_source[SOURCE_MAX]);
