/*
 * Reads BPS_FAILPOINTS when the first point is passed, counts each point's passes, and does what
 * the test asked for. Empty in a build without failpoints.
 */
#include "base/failpoint.h"

#ifdef BPS_FAILPOINTS

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>

#define POINTS_MAX 16
#define DELAY_MS   200

enum action { ACTION_KILL, ACTION_STOP, ACTION_DELAY, ACTION_ERROR, ACTION_CORRUPT, ACTION_DROP };

struct point {
	char name[48];
	enum action action;
	unsigned at;  /* does it the at-th time it is passed, from 1 */
	bool goes_on; /* and each time after that */
	_Atomic unsigned n_passed;
};

static struct point points[POINTS_MAX];
static size_t n_points;
static pthread_once_t once = PTHREAD_ONCE_INIT;

/* A test that asks for what there is not would pass for no reason. */
static void refuse(const char *word)
{
	(void)fprintf(
		stderr,
		"BPS_FAILPOINTS: \"%s\" is not NAME=kill|stop|delay|error|corrupt|drop[@N[+]]\n",
		word);
	abort();
}

static void parse_one(char *word)
{
	static const char *const names[] = { "kill", "stop", "delay", "error", "corrupt", "drop" };
	struct point *point = &points[n_points];
	char *equals = strchr(word, '='), *at, *end;
	size_t i;

	if (!equals || equals == word || equals - word >= (ptrdiff_t)sizeof(point->name) ||
	    n_points == POINTS_MAX)
		refuse(word);
	at = strchr(equals, '@');
	point->at = at ? (unsigned)strtoul(at + 1, &end, 10) : 1;
	point->goes_on = at && !strcmp(end, "+");
	if (!point->at || (at && *end && !point->goes_on))
		refuse(word);
	if (at)
		*at = 0;
	for (i = 0; i < ARRAY_SIZE(names) && strcmp(equals + 1, names[i]); i++)
		;
	if (i == ARRAY_SIZE(names))
		refuse(word);
	point->action = (enum action)i;
	memcpy(point->name, word, (size_t)(equals - word));
	n_points++;
}

static void parse(void)
{
	const char *given = getenv("BPS_FAILPOINTS");
	char *text = given ? strdup(given) : NULL, *save = NULL;

	for (char *word = text ? strtok_r(text, ",", &save) : NULL; word;
	     word = strtok_r(NULL, ",", &save))
		parse_one(word);
	free(text);
}

enum failpoint failpoint_pass(const char *name)
{
	struct timespec delay = { .tv_nsec = DELAY_MS * 1000000L };

	(void)pthread_once(&once, parse);
	for (size_t i = 0; i < n_points; i++) {
		struct point *point = &points[i];

		unsigned n;

		if (strcmp(point->name, name))
			continue;
		n = atomic_fetch_add(&point->n_passed, 1) + 1;
		if (n < point->at || (n > point->at && !point->goes_on))
			continue;
		if (n ==
		    point->at) /* a test that armed the point asks whether the process came there */
			(void)dprintf(STDERR_FILENO, "failpoint %s met\n", name);
		switch (point->action) {
		case ACTION_KILL:
			(void)kill(getpid(), SIGKILL);
			/* The other threads end it too: this one goes no further. */
			for (;;)
				(void)pause();
		case ACTION_STOP:
			(void)kill(getpid(), SIGSTOP);
			break;
		case ACTION_DELAY:
			(void)nanosleep(&delay, NULL);
			break;
		case ACTION_ERROR:
			return FAILPOINT_ERROR;
		case ACTION_CORRUPT:
			return FAILPOINT_CORRUPT;
		case ACTION_DROP:
			return FAILPOINT_DROP;
		}
	}
	return FAILPOINT_NOTHING;
}

#else

/* A file is never empty. */
typedef int failpoint_none;

#endif
