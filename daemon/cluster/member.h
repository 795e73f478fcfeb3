/* What a member may be called, and where it may be: the same rules for files and for what comes over the network. */
#pragma once

#include "cluster/cluster.h"

/* Letters, digits, '.', '-', '_'; at most 63. Returns 0, or -EINVAL with *ret_why a static text. */
int member_name_check(const char *name, const char **ret_why);
/* host:port, at most 95 bytes; IPv6 in brackets. The host is not looked up. As above. */
int member_address_check(const char *address, const char **ret_why);
/* The whole of a member: name, roles that exist, an address where it is a server. As above. */
int member_check(const struct view_member *member, const char **ret_why);
