/* Certificates of two authorities for 127.0.0.1, made anew by openssl(1) in the test's directory. */
#pragma once

#include "test.h"

struct certificates {
	char ca[64], cert[64], key[64];
	char other_ca[64], other_cert[64], other_key[64];
};

static inline void make_certificates(struct certificates *c)
{
	char command[2048];

	(void)snprintf(
		command, sizeof(command),
		"cd %s && exec >/dev/null 2>&1 && for n in a b; do "
		"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
		"-subj /CN=ca-$n -keyout ca-$n.key -out ca-$n.pem && "
		"openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes "
		"-subj /CN=node-$n -keyout $n.key -out $n.csr && "
		"printf 'subjectAltName=IP:127.0.0.1' >ext && "
		"openssl x509 -req -in $n.csr -CA ca-$n.pem -CAkey ca-$n.key -CAcreateserial "
		"-days 2 -extfile ext -out $n.pem || exit 1; done",
		test_dir());
	if (system("command -v openssl >/dev/null"))
		TEST_SKIP("no openssl(1) to make certificates with");
	ASSERT_EQ(system(command), 0);
	(void)snprintf(c->ca, sizeof(c->ca), "%s/ca-a.pem", test_dir());
	(void)snprintf(c->cert, sizeof(c->cert), "%s/a.pem", test_dir());
	(void)snprintf(c->key, sizeof(c->key), "%s/a.key", test_dir());
	(void)snprintf(c->other_ca, sizeof(c->other_ca), "%s/ca-b.pem", test_dir());
	(void)snprintf(c->other_cert, sizeof(c->other_cert), "%s/b.pem", test_dir());
	(void)snprintf(c->other_key, sizeof(c->other_key), "%s/b.key", test_dir());
}
