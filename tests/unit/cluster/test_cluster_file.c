/* The file that lists a cluster: what it may say, and the line that an error names. */
#include "cluster/cluster_file.h"
#include "test.h"

struct parsed {
	int r;
	struct failure failure;
	struct view_member *members;
	size_t n;
};

static void parse_bytes(struct parsed *p, const char *text, size_t len)
{
	*p = (struct parsed){ 0 };
	p->r = cluster_file_parse("cluster.conf", text, len, &p->failure, &p->members, &p->n);
}

static void parse(struct parsed *p, const char *text)
{
	parse_bytes(p, text, strlen(text));
}

TEST(good)
{
	struct parsed p;

	parse(&p, "# who is there\n"
		  "[node a]\n"
		  "address = 10.0.0.1:9690\n"
		  "roles = agent, server\n"
		  "bandwidth = 25Gbit ; both directions\n"
		  "\n"
		  "  [node b-2.rack_1] # indented, and a comment behind\n"
		  "    address=[fd00::2]:9690\n"
		  "    roles = server\n"
		  "\t[ node c ]\n"
		  "roles: agent\n");
	ASSERT_OK(p.r);
	ASSERT_EQ(p.n, 3);
	ASSERT_STR(p.members[0].name, "a");
	ASSERT_STR(p.members[0].address, "10.0.0.1:9690");
	ASSERT_EQ(p.members[0].roles, ROLE_AGENT | ROLE_SERVER);
	ASSERT_EQ(p.members[0].bandwidth_mbps, 25000);
	ASSERT_EQ(p.members[0].id, 0);
	ASSERT_STR(p.members[1].name, "b-2.rack_1");
	ASSERT_STR(p.members[1].address, "[fd00::2]:9690");
	ASSERT_EQ(p.members[1].roles, ROLE_SERVER);
	ASSERT_EQ(p.members[1].bandwidth_mbps, 0);
	ASSERT_STR(p.members[2].name, "c");
	ASSERT_STR(p.members[2].address, "");
	ASSERT_EQ(p.members[2].roles, ROLE_AGENT);
	free(p.members);
}

TEST(defaults_and_line_ends)
{
	struct parsed p;

	/* A byte order mark, DOS line ends, no newline at the end; both roles by default. */
	parse(&p, "\xef\xbb\xbf[node a]\r\naddress = a.example:1\r\n[node b]\r\naddress = b:65535");
	ASSERT_OK(p.r);
	ASSERT_EQ(p.n, 2);
	ASSERT_STR(p.members[0].address, "a.example:1");
	ASSERT_STR(p.members[1].address, "b:65535");
	ASSERT_EQ(p.members[1].roles, ROLE_AGENT | ROLE_SERVER);
	free(p.members);
}

TEST(rates)
{
	static const struct {
		const char *text;
		uint32_t mbps;
	} rates[] = {
		{ "100Mbit", 100 },	{ "2.5Gbit", 2500 },	{ "10 Gbit", 10000 },
		{ "1.6Tbit", 1600000 }, { "2000Kbit", 2 },	{ "10Gb", 0 },
		{ "Gbit", 0 },		{ "-1Gbit", 0 },	{ "0Gbit", 0 },
		{ "1e3Mbit", 0 },	{ "999999999Tbit", 0 }, { "9999999999Mbit", 0 },
	};

	for (size_t i = 0; i < ARRAY_SIZE(rates); i++) {
		char text[128];
		struct parsed p;

		(void)snprintf(text, sizeof(text), "[node a]\naddress=a:1\nbandwidth = %s\n",
			       rates[i].text);
		parse(&p, text);
		if (rates[i].mbps) {
			ASSERT_OK(p.r);
			ASSERT_EQ(p.members[0].bandwidth_mbps, rates[i].mbps);
		} else {
			ASSERT_EQ(p.r, -EINVAL);
			ASSERT_CONTAINS(p.failure.text, "cluster.conf:3: bandwidth");
		}
		free(p.members);
	}
}

/* Each names the file, the line and what to do. */
TEST(errors)
{
	static const struct {
		const char *text, *expected;
	} errors[] = {
		{ "", "cluster.conf: no [node NAME]" },
		{ "# nothing\n\n", "cluster.conf: no [node NAME]" },
		{ "address = a:1\n", "cluster.conf:1: \"address\" stands before" },
		{ "[node a]\naddress=a:1\nport = 2\n",
		  "cluster.conf:3: unknown key \"port\": keys are" },
		{ "[nodes a]\n", "cluster.conf:1: unknown section [nodes a]: write [node NAME]" },
		{ "[defaults]\n", "cluster.conf:1: unknown section [defaults]" },
		{ "[node]\n", "cluster.conf:1: [node] without a name" },
		{ "[node  ]\n", "cluster.conf:1: [node] without a name" },
		{ "[node a\n", "cluster.conf:1: a section without \"]\"" },
		{ "[node a] roles = agent\n", "cluster.conf:1: nothing but a comment" },
		{ "[node a b]\n", "cluster.conf:1: \"a b\": a node's name is made of" },
		{ "[node 0123456789012345678901234567890123456789012345678901234567890123]\n",
		  "1 to 63 characters" },
		{ "[node a]\naddress=a:1\n\n[node b]\naddress=b:1\n[node a]\naddress=c:1\n",
		  "cluster.conf:6: node a is listed twice, first in line 1" },
		{ "[node a]\nroles = server\n",
		  "cluster.conf:1: node a is a server and has no address: add" },
		{ "[node a]\n[node b]\naddress = b:1\n", "cluster.conf:1: node a is a server" },
		{ "[node a]\naddress = a:1\n[node b]\naddress = a:1\n",
		  "cluster.conf:3: node b has the address a:1 of node a (line 1)" },
		{ "[node a]\naddress = a\n",
		  "cluster.conf:2: address \"a\": an address is host:port" },
		{ "[node a]\naddress = a:0\n",
		  "cluster.conf:2: address \"a:0\": a port is a number" },
		{ "[node a]\naddress = a:65536\n", "a port is a number from 1 to 65535" },
		{ "[node a]\naddress = a:1x\n", "a port is a number" },
		{ "[node a]\naddress = :1\n", "an address is host:port" },
		{ "[node a]\naddress = fd00::1:1\n", "stands in brackets" },
		{ "[node a]\naddress = []:1\n", "an address is host:port" },
		{ "[node a]\naddress = [fd00::1:1\n", "an address is host:port" },
		{ "[node a]\naddress = a b:1\n", "a host is a name" },
		{ "[node a]\nroles = agent, worker\n", "cluster.conf:2: unknown role \"worker\"" },
		{ "[node a]\nroles =\n", "cluster.conf:2: no role" },
		{ "[node a]\naddress=a:1\naddress=a:2\n",
		  "cluster.conf:3: address is given twice for node a" },
		{ "[node a]\naddress=a:1\n\nhello\n", "cluster.conf:4: neither [node NAME] nor" },
		/* The first error counts, whoever finds it. */
		{ "[node a]\nhello\naddress=a:x\n", "cluster.conf:2: neither" },
		{ "[node a]\naddress=a:x\nhello\n", "cluster.conf:2: address" },
	};

	for (size_t i = 0; i < ARRAY_SIZE(errors); i++) {
		struct parsed p;

		parse(&p, errors[i].text);
		ASSERT_EQ(p.r, -EINVAL);
		ASSERT_EQ(p.failure.status, -EINVAL);
		ASSERT_CONTAINS(p.failure.text, errors[i].expected);
		ASSERT_TRUE(!p.members);
	}
}

TEST(strange_bytes)
{
	char line[600] = "[node a]\naddress=a:1\n# ";
	struct parsed p;

	parse_bytes(&p, "[node a]\n\0\n", 11);
	ASSERT_EQ(p.r, -EINVAL);
	ASSERT_CONTAINS(p.failure.text, "cluster.conf:2: a NUL byte");

	memset(line + strlen(line), 'x', 400);
	parse(&p, line);
	ASSERT_EQ(p.r, -EINVAL);
	ASSERT_CONTAINS(p.failure.text, "cluster.conf:3: a line has at most");
}

TEST(too_many_nodes)
{
	size_t room = (CLUSTER_NODES_MAX + 2) * 32, at = 0;
	char *text = malloc(room);
	struct parsed p;

	ASSERT_TRUE(text);
	for (unsigned i = 0; i <= CLUSTER_NODES_MAX; i++)
		at += (size_t)snprintf(text + at, room - at, "[node n%u]\nroles=agent\n", i);
	parse(&p, text);
	ASSERT_EQ(p.r, -EINVAL);
	ASSERT_CONTAINS(p.failure.text, "more than 4096 nodes");
	free(text);
}

TEST(unreadable_files)
{
	struct parsed p = { 0 };

	ASSERT_EQ(cluster_file_read("/nowhere/cluster.conf", &p.failure, &p.members, &p.n),
		  -ENOENT);
	ASSERT_CONTAINS(p.failure.text, "/nowhere/cluster.conf");
	ASSERT_EQ(cluster_file_read("/", &p.failure, &p.members, &p.n), -EINVAL);
	ASSERT_CONTAINS(p.failure.text, "not a list of nodes");
}
