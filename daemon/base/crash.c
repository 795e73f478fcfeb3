/*
 * The handler that prints the stack of a fault. main.c installs the handler at the start, in builds
 * with failpoints alone.
 */
#include "base/crash.h"

#if CRASH_IS_REPORTED

#include "proto/c.h"
#include <execinfo.h>
#include <signal.h>
#include <string.h>
#include <unistd.h>

#define FRAMES_MAX 48

static void on_fault(int number)
{
	static const char text[] = "crash: calls, the innermost first:\n";
	void *frames[FRAMES_MAX];
	int n = backtrace(frames, ARRAY_SIZE(frames));

	(void)!write(STDERR_FILENO, text, strlen(text));
	backtrace_symbols_fd(frames, n, STDERR_FILENO);
	(void)raise(number);
}

void crash_tell(void)
{
	static const int signals[] = { SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT };
	/* By a stack of its own: the main thread's may be used up. */
	static char memory[1 << 16];
	stack_t stack = { .ss_sp = memory, .ss_size = sizeof(memory) };
	struct sigaction action = {
		.sa_handler = on_fault,
		.sa_flags = (int)SA_RESETHAND | SA_ONSTACK,
	};
	void *frame;

	/* The first call loads a library, which a handler must not. */
	(void)backtrace(&frame, 1);
	(void)sigaltstack(&stack, NULL);
	for (size_t i = 0; i < ARRAY_SIZE(signals); i++)
		(void)sigaction(signals[i], &action, NULL);
}

#endif
