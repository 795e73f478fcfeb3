/* The text of an origin: one for an address of IPv4, one for a network of IPv6. */
#include "base/source.h"
#include "test.h"
#include <arpa/inet.h>
#include <netinet/in.h>

/* One machine has one address of IPv4, and all that it likes of a network of IPv6. */
TEST(what_one_attacker_may_have_is_one)
{
	static const struct {
		const char *address, *source;
	} cases[] = {
		{ "10.88.0.2", "10.88.0.2" },
		{ "::ffff:10.88.0.2", "10.88.0.2" },
		{ "2001:db8:0:1:aaaa::1", "2001:db8:0:1::/64" },
		{ "2001:db8:0:1::2", "2001:db8:0:1::/64" },
		{ "ffff:ffff:ffff:ffff::2", "ffff:ffff:ffff:ffff::/64" },
	};
	struct sockaddr_storage address = { .ss_family = AF_UNSPEC };
	char source[SOURCE_MAX];

	source_text(&address, source);
	ASSERT_STR(source, "");
	for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
		bool is_6 = strchr(cases[i].address, ':');

		address = (struct sockaddr_storage){ .ss_family = is_6 ? AF_INET6 : AF_INET };
		ASSERT_EQ(inet_pton(address.ss_family, cases[i].address,
				    is_6 ? (void *)&((struct sockaddr_in6 *)&address)->sin6_addr
					 : (void *)&((struct sockaddr_in *)&address)->sin_addr),
			  1);
		source_text(&address, source);
		ASSERT_STR(source, cases[i].source);
	}
}
