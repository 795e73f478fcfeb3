/*
 * Stands in for bps-daemon in test_daemon.c. What it does depends on its last argument: "good" announces itself and
 * waits for SIGTERM, "early" exits with 4 before it is ready, "status" ends with 5 at SIGTERM.
 */
#include "proto/c.h"
#include <signal.h>
#include <stdio.h>
#include <sys/socket.h>
#include <sys/un.h>

static void notify(const char *text)
{
	struct sockaddr_un address = { .sun_family = AF_UNIX };
	const char *path = getenv("NOTIFY_SOCKET");
	int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0 || !path || strlen(path) >= sizeof(address.sun_path))
		exit(90);
	(void)strcpy(address.sun_path, path);
	if (sendto(fd, text, strlen(text), 0, (struct sockaddr *)&address, sizeof(address)) < 0)
		exit(91);
	(void)fd_close(fd);
}

int main(int argc, char **argv)
{
	const char *mode = argv[argc - 1];
	sigset_t set;
	int number;

	(void)sigemptyset(&set);
	(void)sigaddset(&set, SIGTERM);
	(void)sigprocmask(SIG_BLOCK, &set, NULL);
	for (int i = 1; i < argc; i++)
		(void)fprintf(stderr, "argument %s\n", argv[i]);
	if (!strcmp(mode, "early"))
		return 4;
	notify("STATUS=not READY=1 yet");
	notify("STATUS=up\nREADY=1\nX=1");
	(void)sigwait(&set, &number);
	(void)fprintf(stderr, "ends\n");
	return strcmp(mode, "status") ? 0 : 5;
}
