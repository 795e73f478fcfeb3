/* Loop threads: their name, their signals, and how they stop. */
#include "base/loop/thread.h"
#include "test.h"
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

struct probe {
	struct mail mail;
	pthread_t thread;
	char name[16];
	bool sigterm_blocked;
	unsigned n;
};

static void probe_run(struct mail *mail)
{
	struct probe *probe = container_of(mail, struct probe, mail);
	sigset_t mask;

	probe->thread = pthread_self();
	(void)pthread_getname_np(probe->thread, probe->name, sizeof(probe->name));
	(void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
	probe->sigterm_blocked = sigismember(&mask, SIGTERM) == 1;
	probe->n++;
}

TEST(runs_mail_on_a_named_thread_without_signals)
{
	_cleanup_(loop_thread_stopp) struct loop_thread *thread = NULL;
	struct probe probe = { .mail.run = probe_run };
	sigset_t mask;

	ASSERT_OK(loop_thread_start("bps-a-very-long-name", &thread));
	loop_post(loop_thread_loop(thread), &probe.mail);
	thread = loop_thread_stop(thread);
	ASSERT_EQ(probe.n, 1);
	ASSERT_TRUE(!pthread_equal(probe.thread, pthread_self()));
	ASSERT_STR(probe.name, "bps-a-very-long");
	ASSERT_TRUE(probe.sigterm_blocked);
	(void)pthread_sigmask(SIG_SETMASK, NULL, &mask);
	ASSERT_EQ(sigismember(&mask, SIGTERM), 0);
}

static void probe_count(struct mail *mail)
{
	container_of(mail, struct probe, mail)->n++;
}

TEST(stop_runs_what_was_posted_before)
{
	enum { N = 1000 };
	static struct probe probes[N];

	for (unsigned round = 0; round < 20; round++) {
		struct loop_thread *thread;

		ASSERT_OK(loop_thread_start("test", &thread));
		for (size_t i = 0; i < N; i++) {
			probes[i].mail.run = probe_count;
			loop_post(loop_thread_loop(thread), &probes[i].mail);
		}
		(void)loop_thread_stop(thread);
		for (size_t i = 0; i < N; i++)
			ASSERT_EQ(probes[i].n, round + 1);
	}
}

TEST(stop_at_once)
{
	for (unsigned i = 0; i < 50; i++) {
		struct loop_thread *thread;

		ASSERT_OK(loop_thread_start("test", &thread));
		ASSERT_TRUE(!loop_thread_stop(thread));
	}
	ASSERT_TRUE(!loop_thread_stop(NULL));
}
