/*
 * The text that stands for where a connection comes from. transport/ and rpc/ count connections by
 * that text, so that one origin cannot take them all.
 */
#include "base/source.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>

void source_text(const struct sockaddr_storage *address, char ret_source[SOURCE_MAX])
{
	const struct sockaddr_in *in = (const struct sockaddr_in *)address;
	struct in6_addr net = ((const struct sockaddr_in6 *)address)->sin6_addr;
	char host[INET6_ADDRSTRLEN];

	*ret_source = 0;
	if (address->ss_family == AF_INET) {
		(void)inet_ntop(AF_INET, &in->sin_addr, ret_source, SOURCE_MAX);
	} else if (address->ss_family == AF_INET6 && IN6_IS_ADDR_V4MAPPED(&net)) {
		(void)inet_ntop(AF_INET, net.s6_addr + 12, ret_source, SOURCE_MAX);
	} else if (address->ss_family == AF_INET6) {
		memset(net.s6_addr + 8, 0, 8);
		(void)inet_ntop(AF_INET6, &net, host, sizeof(host));
		(void)snprintf(ret_source, SOURCE_MAX, "%.40s/64", host);
	}
}

void source_of(int fd, char ret_source[SOURCE_MAX])
{
	struct sockaddr_storage address = { 0 };
	socklen_t len = sizeof(address);

	if (getpeername(fd, (struct sockaddr *)&address, &len))
		address.ss_family = AF_UNSPEC;
	source_text(&address, ret_source);
}
