/*
 * The rules for names, addresses and members. cluster_file.c checks what a file says by them,
 * wire.c and etcd/source.c what comes over the network.
 */
#include "cluster/member.h"

static bool is_alnum(char c)
{
	/* Not isalnum(): no locale may widen it. */
	return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

int member_name_check(const char *name, const char **ret_why)
{
	size_t len = strnlen(name, sizeof(((struct view_member *)NULL)->name));

	if (!len || len == sizeof(((struct view_member *)NULL)->name)) {
		*ret_why = "a node's name has 1 to 63 characters";
		return -EINVAL;
	}
	for (size_t i = 0; i < len; i++) {
		if (!is_alnum(name[i]) && !strchr(".-_", name[i])) {
			*ret_why = "a node's name is made of letters, digits, '.', '-' and '_'";
			return -EINVAL;
		}
	}
	return 0;
}

static bool port_valid(const char *port)
{
	unsigned number = 0;
	size_t n = 0;

	for (; port[n] >= '0' && port[n] <= '9' && n < 6; n++)
		number = number * 10 + (unsigned)(port[n] - '0');
	return n && !port[n] && number >= 1 && number <= 65535;
}

int member_address_check(const char *address, const char **ret_why)
{
	size_t len = strnlen(address, sizeof(((struct view_member *)NULL)->address));
	const char *colon = strrchr(address, ':'), *end;
	bool bracketed = *address == '[';

	if (len == sizeof(((struct view_member *)NULL)->address)) {
		*ret_why = "an address has at most 95 characters";
		return -EINVAL;
	}
	if (!colon || !len) {
		*ret_why = "an address is host:port";
		return -EINVAL;
	}
	if (!port_valid(colon + 1)) {
		*ret_why = "a port is a number from 1 to 65535";
		return -EINVAL;
	}
	end = bracketed ? colon - 1 : colon;
	if (bracketed ? end <= address + 1 || *end != ']' : end == address) {
		*ret_why = "an address is host:port, or [IPv6]:port";
		return -EINVAL;
	}
	for (const char *c = address + bracketed; c < end; c++) {
		if (*c == ':' && !bracketed) {
			*ret_why = "an IPv6 address stands in brackets: [IPv6]:port";
			return -EINVAL;
		}
		if (!is_alnum(*c) && !strchr(bracketed ? ":.%" : ".-_", *c)) {
			*ret_why =
				"a host is a name, an IPv4 address, or an IPv6 address in brackets";
			return -EINVAL;
		}
	}
	return 0;
}

int member_check(const struct view_member *member, const char **ret_why)
{
	int r;

	r = member_name_check(member->name, ret_why);
	if (r)
		return r;
	if (!member->roles ||
	    member->roles & ~(uint32_t)(ROLE_AGENT | ROLE_SERVER | ROLE_COORDINATOR)) {
		*ret_why = "a member has one or more of the roles agent, server, coordinator";
		return -EINVAL;
	}
	if (!*member->address && member->roles & ROLE_SERVER) {
		*ret_why = "a server needs an address";
		return -EINVAL;
	}
	return *member->address ? member_address_check(member->address, ret_why) : 0;
}
