/* Addresses as text, the resolver's thread, sockets inside the machine, congestion control. */
#include "test.h"
#include "transport/common/address.h"
#include "transport/common/worker.h"
#include <netinet/tcp.h>
#include <poll.h>

TEST(split)
{
	char host[TRANSPORT_ADDRESS_MAX];
	const char *port;

	ASSERT_OK(address_split("10.88.0.2:9690", host, &port));
	ASSERT_STR(host, "10.88.0.2");
	ASSERT_STR(port, "9690");
	ASSERT_OK(address_split("[fd00::1]:1", host, &port));
	ASSERT_STR(host, "fd00::1");
	ASSERT_STR(port, "1");
	ASSERT_OK(address_split(":0", host, &port));
	ASSERT_STR(host, "");
	ASSERT_OK(address_split("node-a.cluster.local:65535", host, &port));
	ASSERT_STR(host, "node-a.cluster.local");
}

TEST(not_an_address)
{
	static const char *const bad[] = {
		"",	      "host",	     "host:",
		":",	      "host:port",   "host:1x",
		"host:-1",    "host:65536",  "fd00::1",
		"fd00::1:80", "[fd00::1:80", "[fd00::1]80",
		"]:80:",      "host: 80",    "host:99999999999999999999",
	};
	char host[TRANSPORT_ADDRESS_MAX], longest[TRANSPORT_ADDRESS_MAX + 1];
	const char *port;

	for (unsigned i = 0; i < ARRAY_SIZE(bad); i++)
		if (address_split(bad[i], host, &port) != -EINVAL)
			test_fail(__FILE__, __LINE__, "\"%s\" is an address", bad[i]);
	memset(longest, 'h', sizeof(longest));
	memcpy(longest + TRANSPORT_ADDRESS_MAX - 2, ":1", 3);
	ASSERT_EQ(address_split(longest, host, &port), -EINVAL);
	memmove(longest, longest + 1, TRANSPORT_ADDRESS_MAX);
	ASSERT_OK(address_split(longest, host, &port));
}

TEST(resolve_and_format)
{
	struct addresses addresses;
	const char *why = "";
	char text[64];

	ASSERT_OK(address_resolve("127.0.0.1:80", true, false, &addresses, &why));
	ASSERT_EQ(addresses.n, 1);
	address_format(&addresses.list[0], text, sizeof(text));
	ASSERT_STR(text, "127.0.0.1:80");
	ASSERT_OK(address_resolve("[::1]:80", true, false, &addresses, &why));
	address_format(&addresses.list[0], text, sizeof(text));
	ASSERT_STR(text, "[::1]:80");
	ASSERT_OK(address_resolve("[::ffff:10.0.0.1]:9", true, false, &addresses, &why));
	address_format(&addresses.list[0], text, sizeof(text));
	ASSERT_STR(text, "10.0.0.1:9");
	ASSERT_EQ(address_resolve("localhost:80", true, false, &addresses, &why), -EAGAIN);
	ASSERT_EQ(address_resolve("localhost", false, false, &addresses, &why), -EINVAL);
	ASSERT_OK(address_resolve("localhost:80", false, false, &addresses, &why));
	ASSERT_INT(addresses.n, >, 0);
}

struct resolved {
	unsigned n;
	int r;
	size_t n_addresses;
};

static void on_resolved(void *user, int r, const char *why, const struct addresses *addresses)
{
	struct resolved *resolved = user;

	(void)why;
	resolved->n++;
	resolved->r = r;
	resolved->n_addresses = addresses->n;
}

TEST(resolver_answers_in_the_loop)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct resolved resolved = { 0 };
	struct resolver *resolver;
	struct resolver_params params = { .address = "localhost:1",
					  .done = on_resolved,
					  .user = &resolved };
	struct mailboxes mailboxes;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	params.mailbox = &mailbox;
	ASSERT_OK(resolver_start(&params, &resolver));
	while (!resolved.n)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_OK(resolved.r);
	ASSERT_INT(resolved.n_addresses, >, 0);
	resolver_free(resolver);
}

/* Given up at once, the answer comes to nobody; whether it was posted before or not. */
TEST(resolver_given_up)
{
	_cleanup_(loop_freep) struct loop *loop = NULL;
	struct resolved resolved = { 0 };
	struct resolver *resolvers[20], *last;
	struct resolver_params params = { .address = "localhost:1",
					  .done = on_resolved,
					  .user = &resolved };
	struct mailboxes mailboxes;
	struct mailbox mailbox;

	ASSERT_OK(loop_new(&loop));
	mailboxes_init(&mailboxes, loop);
	mailbox_init(&mailbox, &mailboxes);
	params.mailbox = &mailbox;
	for (unsigned i = 0; i < ARRAY_SIZE(resolvers); i++)
		ASSERT_OK(resolver_start(&params, &resolvers[i]));
	for (unsigned i = 0; i < ARRAY_SIZE(resolvers); i++)
		resolver_free(resolvers[i]);
	ASSERT_OK(resolver_start(&params, &last));
	while (!resolved.n)
		ASSERT_OK(loop_turn(loop, -1));
	ASSERT_EQ(resolved.n, 1);
	resolver_free(last);
	mailboxes_drain(&mailboxes);
	ASSERT_EQ(resolved.n, 1);
}

static const char *congestion_of(const char *text, const char *name, char ret_name[64])
{
	_cleanup_(fd_closep) int fd = -1;
	struct addresses addresses;
	socklen_t len = 64;
	const char *why;

	ASSERT_OK(address_resolve(text, true, false, &addresses, &why));
	fd = socket(addresses.list[0].any.sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	ASSERT_INT(fd, >=, 0);
	ASSERT_OK(address_set_congestion(fd, &addresses.list[0], name));
	ASSERT_OK(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, ret_name, &len));
	return ret_name;
}

static bool is_inside(const char *address)
{
	_cleanup_(fd_closep) int fd = -1;
	struct addresses addresses;
	const char *why;

	ASSERT_OK(address_resolve(address, true, false, &addresses, &why));
	fd = socket(addresses.list[0].any.sa_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	ASSERT_TRUE(fd >= 0);
	ASSERT_TRUE(!address_is_inside(fd)); /* not connected */
	ASSERT_OK(connect(fd, &addresses.list[0].any, addresses.list[0].len));
	return address_is_inside(fd);
}

TEST(inside_the_machine)
{
	_cleanup_(fd_closep) int a = -1, b = -1;
	int pair[2];

	ASSERT_TRUE(is_inside("127.0.0.1:9"));
	ASSERT_TRUE(is_inside("127.1.2.3:9"));
	ASSERT_TRUE(is_inside("[::1]:9"));
	ASSERT_TRUE(is_inside("[::ffff:127.0.0.1]:9"));
	ASSERT_OK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair));
	a = pair[0];
	b = pair[1];
	ASSERT_TRUE(!address_is_inside(a) && !address_is_inside(b));
}

/* The system's, unless all of it is on this machine or somebody says another. */
TEST(congestion_control)
{
	static const struct address any = { .any.sa_family = AF_INET };
	_cleanup_(fd_closep) int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	char systems[64], name[64];
	socklen_t len = sizeof(systems);

	ASSERT_OK(getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, systems, &len));
	ASSERT_STR(congestion_of("192.0.2.1:1", "", name), systems);
	ASSERT_STR(congestion_of("126.0.0.1:1", "", name), systems);
	ASSERT_STR(congestion_of("127.255.0.1:1", "", name), "reno");
	ASSERT_STR(congestion_of("[::ffff:127.0.0.1]:1", "", name), "reno");
	ASSERT_STR(congestion_of("[::ffff:192.0.2.1]:1", "", name), systems);
	ASSERT_STR(congestion_of("[::1]:1", "", name), "reno");
	ASSERT_STR(congestion_of("[fd00::1]:1", "", name), systems);
	ASSERT_STR(congestion_of("192.0.2.1:1", "reno", name), "reno");
	ASSERT_EQ(address_set_congestion(fd, &any, "no-such-one"), -ENOENT);
}

/* A piece that the kernel holds back until its segment is full, the longest there may be, keeps nobody from filling it. */
TEST(what_fills_a_segment_is_asked_for)
{
	struct sockaddr_in address = { .sin_family = AF_INET,
				       .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	_cleanup_(fd_closep) int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	_cleanup_(fd_closep) int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	_cleanup_(fd_closep) int other = -1;
	struct pollfd poll_of = { .events = POLLOUT };
	socklen_t len = sizeof(address);
	static char bytes[64 << 10];
	int segment;

	ASSERT_OK(bind(listener, (struct sockaddr *)&address, sizeof(address)));
	ASSERT_OK(listen(listener, 1));
	ASSERT_OK(getsockname(listener, (struct sockaddr *)&address, &len));
	ASSERT_OK(connect(fd, (struct sockaddr *)&address, sizeof(address)));
	address_tune_socket(fd, NSEC_PER_SEC);
	address_set_ahead(fd, 1);
	/* Segments are half as long before anything has gone. */
	other = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
	ASSERT_INT(other, >=, 0);
	for (unsigned i = 0; i < 64; i++) {
		ASSERT_EQ(send(fd, bytes, sizeof(bytes), 0), sizeof(bytes));
		ASSERT_EQ(recv(other, bytes, sizeof(bytes), MSG_WAITALL), sizeof(bytes));
	}
	len = sizeof(segment);
	ASSERT_OK(getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, &segment, &len));
	ASSERT_INT(segment, <=, sizeof(bytes));
	ASSERT_EQ(send(fd, bytes, (size_t)segment - 1, MSG_MORE), segment - 1);
	poll_of.fd = fd;
	ASSERT_EQ(poll(&poll_of, 1, 0), 1);
	ASSERT_EQ(poll_of.revents, POLLOUT);
}
