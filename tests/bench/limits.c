/*
 * What this machine can do at all, measured beside bps: memcpy and one TCP stream.
 *
 *	limits copy BYTES THREADS	copies BYTES in each of THREADS threads; prints nanoseconds, the best of five
 *	limits listen HOST		accepts one stream and reads it to its end; prints its port first
 *	limits send HOST PORT BYTES	sends BYTES, waits for the other side's close; prints nanoseconds
 */
#include <arpa/inet.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define COPIES 5

static size_t bytes;
static pthread_barrier_t start;

static long long now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static void *copy_thread(void *unused)
{
	char *from = malloc(bytes), *to = malloc(bytes);

	if (!from || !to)
		die("malloc");
	memset(from, 1, bytes);
	memset(to, 2, bytes);
	for (int i = 0; i < COPIES; i++) {
		pthread_barrier_wait(&start);
		memcpy(to, from, bytes);
		pthread_barrier_wait(&start);
		/* The copy must not be optimised away. */
		if (memcmp(to + bytes / 2, from + bytes / 2, 1))
			abort();
	}
	free(from);
	free(to);
	return NULL;
}

static void copy(unsigned n_threads)
{
	pthread_t threads[64];
	long long best = LLONG_MAX;

	if (n_threads < 1 || n_threads > 64)
		exit(2);
	pthread_barrier_init(&start, NULL, n_threads + 1);
	for (unsigned i = 0; i < n_threads; i++) {
		if (pthread_create(&threads[i], NULL, copy_thread, NULL))
			die("pthread_create");
	}
	for (int i = 0; i < COPIES; i++) {
		long long began, took;

		pthread_barrier_wait(&start);
		began = now_ns();
		pthread_barrier_wait(&start);
		took = now_ns() - began;
		best = took < best ? took : best;
	}
	printf("%lld\n", best);
	for (unsigned i = 0; i < n_threads; i++)
		pthread_join(threads[i], NULL);
}

static struct sockaddr_in address(const char *host, const char *port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };

	if (inet_pton(AF_INET, host, &a.sin_addr) != 1)
		die(host);
	return a;
}

static void listen_once(const char *host)
{
	struct sockaddr_in a = address(host, "0");
	socklen_t len = sizeof(a);
	size_t room = 1 << 20;
	char *buffer = malloc(room);
	int fd = socket(AF_INET, SOCK_STREAM, 0), stream;

	if (!buffer || bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 1) ||
	    getsockname(fd, (struct sockaddr *)&a, &len))
		die("listen");
	printf("%d\n", ntohs(a.sin_port));
	fflush(stdout);
	stream = accept(fd, NULL, NULL);
	while (read(stream, buffer, room) > 0)
		;
	free(buffer);
}

static void send_all(const char *host, const char *port)
{
	struct sockaddr_in a = address(host, port);
	size_t piece = 1 << 20;
	char *buffer = calloc(1, piece), byte;
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	long long began;

	if (!buffer || connect(fd, (struct sockaddr *)&a, sizeof(a)))
		die("connect");
	began = now_ns();
	for (size_t sent = 0; sent < bytes;) {
		ssize_t n = write(fd, buffer, bytes - sent < piece ? bytes - sent : piece);

		if (n < 0)
			die("write");
		sent += (size_t)n;
	}
	shutdown(fd, SHUT_WR);
	if (read(fd, &byte, 1) != 0)
		die("read");
	printf("%lld\n", now_ns() - began);
	free(buffer);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "copy")) {
		bytes = strtoull(argv[2], NULL, 0);
		copy((unsigned)atoi(argv[3]));
	} else if (argc == 3 && !strcmp(argv[1], "listen")) {
		listen_once(argv[2]);
	} else if (argc == 5 && !strcmp(argv[1], "send")) {
		bytes = strtoull(argv[4], NULL, 0);
		send_all(argv[2], argv[3]);
	} else {
		fprintf(stderr, "limits copy BYTES THREADS | listen HOST | send HOST PORT BYTES\n");
		return 2;
	}
	return 0;
}
