/*
 * What this machine can do at all, measured beside bps: memcpy and one TCP stream.
 *
 *	limits copy BYTES THREADS	copies BYTES in each of THREADS threads; prints nanoseconds, the best of five
 *	limits listen HOST		accepts one stream and reads it to its end; prints its port first, then the bytes that came after
 *					the first 4 MiB, in which queues and windows fill, and their nanoseconds
 *	limits send HOST PORT BYTES [CONGESTION]
 *					sends BYTES, more than 4 MiB, and waits for the other side's close. CONGESTION: how TCP controls
 *					it (reno, bbr, ...) if not as the system says
 *	limits echo HOST BYTES		accepts one stream and sends each message back; prints its port first
 *	limits bounce HOST PORT BYTES	a message of BYTES there and back, both sides asleep while they wait; prints
 *					nanoseconds of half a round, the median
 *	limits futex			a wake-up of a thread that sleeps on another core; prints nanoseconds, the median
 *	limits spin			a word there and back between two threads that spin; prints nanoseconds, the median
 *	limits meet sleep|spin		two processes that meet in a third, which answers when both have come: by a futex each way; or all
 *					look and yield. Prints nanoseconds from a process's coming to its answer, by the slower, the median
 *	limits halves BYTES		two processes that meet, sum half of BYTES each, from both's memory to both's, and meet again: all that
 *					a sum of two ranks of one machine needs, where they trust each other. Prints nanoseconds, by the slower,
 *					the median
 *	limits relay BYTES		as meet, by way of five processes: each of the two has one beside it that sends BYTES to the third by
 *					TCP over loopback, which sends as many to both when both have come. What a push_pull by two workers
 *					and a server hands over, and nothing else
 *
 * listen and send also print, last, the nanoseconds of CPU that their process used for the stream.
 */
#include <arpa/inet.h>
#include <limits.h>
#include <linux/futex.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define COPIES	   5
#define BOUNCES	   2000
#define WARM_UP	   50
#define WARM_BYTES (4ul << 20)

static size_t bytes;
static pthread_barrier_t start;

static long long now_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_MONOTONIC, &ts);
	return ts.tv_sec * 1000000000ll + ts.tv_nsec;
}

static long long cpu_ns(void)
{
	struct timespec ts;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
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

/* Binds, says its port, and returns the first stream that comes. */
static int accept_one(const char *host)
{
	struct sockaddr_in a = address(host, "0");
	socklen_t len = sizeof(a);
	int fd = socket(AF_INET, SOCK_STREAM, 0), stream, one = 1;

	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 1) ||
	    getsockname(fd, (struct sockaddr *)&a, &len))
		die("listen");
	printf("%d\n", ntohs(a.sin_port));
	fflush(stdout);
	stream = accept(fd, NULL, NULL);
	if (stream < 0 || setsockopt(stream, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		die("accept");
	return stream;
}

static int connect_to(const char *host, const char *port, const char *congestion)
{
	struct sockaddr_in a = address(host, port);
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	if (congestion &&
	    setsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, congestion, (socklen_t)strlen(congestion)))
		die(congestion);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a)) ||
	    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		die("connect");
	return fd;
}

static void listen_once(const char *host)
{
	size_t target = 1 << 20, came = 0, warm = 0;
	char *buffer = malloc(target);
	int stream = accept_one(host);
	long long cpu = cpu_ns(), began = 0, ended = 0;
	ssize_t n;

	if (!buffer)
		die("malloc");
	memset(buffer, 0, target);
	while ((n = read(stream, buffer, target)) > 0) {
		came += (size_t)n;
		ended = now_ns();
		if (!began && came >= WARM_BYTES) {
			began = ended;
			warm = came;
		}
	}
	if (n < 0 || came <= warm || !began)
		die("listen: a stream that ended before it was warm");
	printf("%zu %lld %lld\n", came - warm, ended - began, cpu_ns() - cpu);
	free(buffer);
}

static void write_all(int fd, const char *buffer, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = write(fd, buffer + done, len - done);

		if (n <= 0)
			die("write");
		done += (size_t)n;
	}
}

/* Whether there was a whole message. */
static int read_all(int fd, char *buffer, size_t len)
{
	for (size_t done = 0; done < len;) {
		ssize_t n = read(fd, buffer + done, len - done);

		if (n <= 0)
			return 0;
		done += (size_t)n;
	}
	return 1;
}

static void send_all(const char *host, const char *port, const char *congestion)
{
	size_t piece = 1 << 20;
	char *buffer = calloc(1, piece), byte;
	int fd = connect_to(host, port, congestion);
	long long cpu = cpu_ns();

	if (!buffer)
		die("calloc");
	memset(buffer, 1, piece);
	for (size_t sent = 0; sent < bytes; sent += piece)
		write_all(fd, buffer, bytes - sent < piece ? bytes - sent : piece);
	shutdown(fd, SHUT_WR);
	while (read(fd, &byte, 1) > 0)
		;
	printf("%lld\n", cpu_ns() - cpu);
	free(buffer);
}

static int compare(const void *a, const void *b)
{
	long long x = *(const long long *)a, y = *(const long long *)b;

	return (x > y) - (x < y);
}

static void print_median(long long *times, size_t n)
{
	qsort(times, n, sizeof(*times), compare);
	printf("%lld\n", times[n / 2]);
}

static void echo(const char *host, size_t len)
{
	char *buffer = malloc(len);
	int stream = accept_one(host);

	while (buffer && read_all(stream, buffer, len))
		write_all(stream, buffer, len);
	free(buffer);
}

static void bounce(const char *host, const char *port, size_t len)
{
	long long times[BOUNCES];
	char *buffer = calloc(1, len);
	int fd = connect_to(host, port, NULL);

	for (int i = -WARM_UP; i < BOUNCES; i++) {
		long long began = now_ns();

		write_all(fd, buffer, len);
		if (!buffer || !read_all(fd, buffer, len))
			die("bounce");
		times[i < 0 ? 0 : i] = (now_ns() - began) / 2;
		usleep(200); /* both sides fall asleep */
	}
	print_median(times, BOUNCES);
	free(buffer);
}

/* Two threads, on cores of their own, hand a word to each other: asleep in the kernel, or spinning. */
static struct {
	_Atomic unsigned word;
	_Atomic long long sent_ns;
	long long times[BOUNCES];
} hand;

static void pin(int core)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(core, &set);
	(void)sched_setaffinity(0, sizeof(set), &set); /* one core: both share it */
}

static void *sleeper(void *unused)
{
	pin(1);
	for (unsigned i = 0; i < BOUNCES; i++) {
		while (atomic_load(&hand.word) == i)
			syscall(SYS_futex, &hand.word, FUTEX_WAIT_PRIVATE, i, NULL, NULL, 0);
		hand.times[i] = now_ns() - atomic_load(&hand.sent_ns);
	}
	return unused;
}

static void *spinner(void *unused)
{
	pin(1);
	for (unsigned i = 0; i < BOUNCES; i++) {
		while (atomic_load(&hand.word) != 2 * i + 1)
			;
		atomic_store(&hand.word, 2 * i + 2);
	}
	return unused;
}

static void futex(void)
{
	pthread_t thread;

	pin(0);
	if (pthread_create(&thread, NULL, sleeper, NULL))
		die("pthread_create");
	for (unsigned i = 0; i < BOUNCES; i++) {
		usleep(200); /* it falls asleep */
		atomic_store(&hand.sent_ns, now_ns());
		atomic_store(&hand.word, i + 1);
		syscall(SYS_futex, &hand.word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
	}
	pthread_join(thread, NULL);
	print_median(hand.times, BOUNCES);
}

static void spin(void)
{
	pthread_t thread;

	pin(0);
	if (pthread_create(&thread, NULL, spinner, NULL))
		die("pthread_create");
	for (unsigned i = 0; i < BOUNCES; i++) {
		long long began = now_ns();

		atomic_store(&hand.word, 2 * i + 1);
		while (atomic_load(&hand.word) != 2 * i + 2)
			;
		hand.times[i] = now_ns() - began;
	}
	pthread_join(thread, NULL);
	print_median(hand.times, BOUNCES);
}

/*
 * Meetings. Rounds come in pairs, the first to begin the second at one time, as a barrier before what is measured.
 * Everything between processes is in memory that they share, but for the bytes.
 */
#define SIDES 2

static struct meeting {
	_Atomic unsigned come[SIDES], answered[SIDES]; /* rounds */
	_Atomic unsigned total;			       /* of all sides: what the third sleeps on */
	long long times[SIDES][BOUNCES];
} * meeting;

static bool spins;

static void wait_beyond(_Atomic unsigned *word, unsigned old)
{
	while (atomic_load(word) == old) {
		if (spins)
			sched_yield();
		else
			syscall(SYS_futex, word, FUTEX_WAIT, old, NULL, NULL, 0);
	}
}

static void tell(_Atomic unsigned *word)
{
	atomic_fetch_add(word, 1);
	if (!spins)
		syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

static void take_part(unsigned side, _Atomic unsigned *told)
{
	for (unsigned round = 0; round < 2 * (WARM_UP + BOUNCES); round++) {
		long long began = now_ns();
		unsigned i = round / 2;

		tell(told);
		wait_beyond(&meeting->answered[side], round);
		if (round % 2 && i >= WARM_UP)
			meeting->times[side][i - WARM_UP] = now_ns() - began;
	}
	_exit(0);
}

static void answer_both(void)
{
	for (unsigned round = 0;; round++) {
		unsigned total;

		while ((total = atomic_load(&meeting->total)) < SIDES * (round + 1))
			wait_beyond(&meeting->total, total);
		for (unsigned side = 0; side < SIDES; side++)
			tell(&meeting->answered[side]);
	}
}

static pid_t start_child(void)
{
	pid_t pid = fork();

	if (pid < 0)
		die("fork");
	if (!pid)
		prctl(PR_SET_PDEATHSIG, SIGKILL);
	return pid;
}

static void print_meeting(pid_t *parts, pid_t *others, size_t n_others)
{
	for (unsigned side = 0; side < SIDES; side++)
		waitpid(parts[side], NULL, 0);
	for (size_t i = 0; i < n_others; i++) {
		kill(others[i], SIGKILL);
		waitpid(others[i], NULL, 0);
	}
	for (size_t i = 0; i < BOUNCES; i++)
		if (meeting->times[0][i] < meeting->times[1][i])
			meeting->times[0][i] = meeting->times[1][i];
	print_median(meeting->times[0], BOUNCES);
}

static void *share(size_t len)
{
	void *memory = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		die("mmap");
	return memory;
}

static void share_meeting(void)
{
	meeting = share(sizeof(*meeting));
}

static void meet(bool spin)
{
	pid_t parts[SIDES], third;

	share_meeting();
	spins = spin;
	third = start_child();
	if (!third)
		answer_both();
	for (unsigned side = 0; side < SIDES; side++) {
		parts[side] = start_child();
		if (!parts[side])
			take_part(side, &meeting->total);
	}
	print_meeting(parts, &third, 1);
}

/* Waits for the others' as many meetings, met of which have been. */
static void meet_others(unsigned *met)
{
	atomic_fetch_add(&meeting->total, 1);
	*met += SIDES;
	while (atomic_load(&meeting->total) < *met)
		sched_yield();
}

static void sum_half(unsigned side, float *const inputs[SIDES], float *const outputs[SIDES])
{
	size_t n = bytes / sizeof(float) / SIDES;

	for (size_t i = side * n; i < (side + 1) * n; i++)
		outputs[0][i] = outputs[1][i] = inputs[0][i] + inputs[1][i];
}

static void halves(void)
{
	float *inputs[SIDES], *outputs[SIDES];
	pid_t parts[SIDES];

	share_meeting();
	for (unsigned side = 0; side < SIDES; side++) {
		inputs[side] = share(bytes);
		outputs[side] = share(bytes);
	}
	for (unsigned side = 0; side < SIDES; side++) {
		unsigned met = 0;

		parts[side] = start_child();
		if (parts[side])
			continue;
		for (int i = -WARM_UP; i < BOUNCES; i++) {
			long long began;

			meet_others(&met);
			began = now_ns();
			meet_others(&met);
			sum_half(side, inputs, outputs);
			meet_others(&met);
			meeting->times[side][i < 0 ? 0 : i] = now_ns() - began;
		}
		_exit(0);
	}
	print_meeting(parts, NULL, 0);
}

static size_t relay_len(unsigned round)
{
	return round % 2 ? bytes : 1;
}

static void relay_beside(unsigned side, int stream, char *buffer)
{
	for (unsigned round = 0;; round++) {
		wait_beyond(&meeting->come[side], round);
		write_all(stream, buffer, relay_len(round));
		if (!read_all(stream, buffer, relay_len(round)))
			_exit(0);
		tell(&meeting->answered[side]);
	}
}

static void relay_third(const int streams[SIDES], char *buffer)
{
	for (unsigned round = 0;; round++) {
		for (unsigned side = 0; side < SIDES; side++)
			if (!read_all(streams[side], buffer, relay_len(round)))
				_exit(0);
		for (unsigned side = 0; side < SIDES; side++)
			write_all(streams[side], buffer, relay_len(round));
	}
}

static void open_stream(int ends[2])
{
	struct sockaddr_in a = address("127.0.0.1", "0");
	socklen_t len = sizeof(a);
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	ends[0] = socket(AF_INET, SOCK_STREAM, 0);
	if (bind(fd, (struct sockaddr *)&a, sizeof(a)) || listen(fd, 1) ||
	    getsockname(fd, (struct sockaddr *)&a, &len) ||
	    connect(ends[0], (struct sockaddr *)&a, sizeof(a)))
		die("stream");
	ends[1] = accept(fd, NULL, NULL);
	for (unsigned i = 0; i < 2; i++)
		if (setsockopt(ends[i], IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
			die("stream");
	close(fd);
}

static void relay(void)
{
	pid_t parts[SIDES], others[SIDES + 1];
	int ends[SIDES][2], far[SIDES];
	char *buffer = calloc(1, bytes + 1);

	if (!buffer)
		die("calloc");
	share_meeting();
	for (unsigned side = 0; side < SIDES; side++) {
		open_stream(ends[side]);
		far[side] = ends[side][1];
	}
	others[SIDES] = start_child();
	if (!others[SIDES])
		relay_third(far, buffer);
	for (unsigned side = 0; side < SIDES; side++) {
		others[side] = start_child();
		if (!others[side])
			relay_beside(side, ends[side][0], buffer);
	}
	for (unsigned side = 0; side < SIDES; side++) {
		parts[side] = start_child();
		if (!parts[side])
			take_part(side, &meeting->come[side]);
	}
	print_meeting(parts, others, SIDES + 1);
	free(buffer);
}

int main(int argc, char **argv)
{
	if (argc == 4 && !strcmp(argv[1], "copy")) {
		bytes = strtoull(argv[2], NULL, 0);
		copy((unsigned)atoi(argv[3]));
	} else if (argc == 3 && !strcmp(argv[1], "listen")) {
		listen_once(argv[2]);
	} else if ((argc == 5 || argc == 6) && !strcmp(argv[1], "send")) {
		bytes = strtoull(argv[4], NULL, 0);
		send_all(argv[2], argv[3], argv[5]);
	} else if (argc == 4 && !strcmp(argv[1], "echo")) {
		echo(argv[2], strtoull(argv[3], NULL, 0));
	} else if (argc == 5 && !strcmp(argv[1], "bounce")) {
		bounce(argv[2], argv[3], strtoull(argv[4], NULL, 0));
	} else if (argc == 2 && !strcmp(argv[1], "futex")) {
		futex();
	} else if (argc == 2 && !strcmp(argv[1], "spin")) {
		spin();
	} else if (argc == 3 && !strcmp(argv[1], "meet")) {
		meet(!strcmp(argv[2], "spin"));
	} else if (argc == 3 && !strcmp(argv[1], "halves")) {
		bytes = strtoull(argv[2], NULL, 0);
		halves();
	} else if (argc == 3 && !strcmp(argv[1], "relay")) {
		bytes = strtoull(argv[2], NULL, 0);
		relay();
	} else {
		fprintf(stderr, "limits copy BYTES THREADS | listen HOST | send HOST PORT BYTES "
				"[CONGESTION] | echo HOST BYTES | bounce HOST PORT BYTES | futex | "
				"spin | meet sleep|spin | halves BYTES | "
				"relay BYTES\n");
		return 2;
	}
	return 0;
}
