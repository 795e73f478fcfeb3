/*
 * A client as every other file of the library sees it: its references and mutex, what fork(2) must
 * not leave in a child, and what the caller is told once. client.h says how threads share a client.
 */
#include "client.h"
#include <stdarg.h>
#include <stdio.h>
#include <sys/epoll.h>
#include <sys/mman.h>

/*
 * Fork. The child of a trainer must not keep the trainer's socket open: the daemon would not see the trainer die. So
 * every open client is in this list, and the child closes what it inherited, has copies of what is shared, and nothing of
 * what is the daemon's. It cannot touch anything else: the thread that held the client's mutex may not exist any more.
 */
static pthread_mutex_t clients_mutex = PTHREAD_MUTEX_INITIALIZER;
static LIST_HEAD(, bps_client) clients;
static _Atomic uint32_t process_generation;
static void (*fork_hook)(void); /* in the child */

void client_fork_lock(void)
{
	(void)pthread_mutex_lock(&clients_mutex);
}

void client_fork_unlock(void)
{
	(void)pthread_mutex_unlock(&clients_mutex);
}

void client_close_fds(struct bps_client *client)
{
	client->socket = fd_close(client->socket);
	client->daemon_event = fd_close(client->daemon_event);
	client->trainer_event = fd_close(client->trainer_event);
	client->timer = fd_close(client->timer);
	client->job.ledger = fd_close(client->job.ledger);
	client->wakeup = fd_close(client->wakeup);
	client->attention = fd_close(client->attention);
	client->epoll = fd_close(client->epoll);
}

static void fork_child(void)
{
	struct bps_client *client;

	process_generation++;
	LIST_FOREACH(client, &clients, link)
	client_close_fds(client);
	LIST_INIT(&clients);
	fork_hook();
	client_fork_unlock();
}

static int fork_result;

static void fork_register(void)
{
	fork_result = pthread_atfork(client_fork_lock, client_fork_unlock, fork_child);
}

int client_fork_guard(void (*hook)(void))
{
	static pthread_once_t once = PTHREAD_ONCE_INIT;

	client_fork_lock();
	fork_hook = hook;
	client_fork_unlock();
	(void)pthread_once(&once, fork_register);
	return fork_result ? error_set(-fork_result, "out of memory") : 0;
}

void client_fork_add(struct bps_client *client)
{
	client_fork_lock();
	client->generation = process_generation;
	LIST_INSERT_HEAD(&clients, client, link);
	client_fork_unlock();
}

void client_fork_remove(struct bps_client *client)
{
	client_fork_lock();
	LIST_REMOVE(client, link);
	client_fork_unlock();
}

int client_check(const struct bps_client *client)
{
	if (!client)
		return error_set(-EINVAL, "the client is NULL");
	if (client->generation != process_generation)
		return error_set(-EPERM, "this client belongs to the parent process: open another "
					 "after fork()");
	return 0;
}

void client_lock(struct bps_client *client)
{
	(void)pthread_mutex_lock(&client->mutex);
}

void client_unlock(struct bps_client *client)
{
	(void)pthread_mutex_unlock(&client->mutex);
}

struct bps_client *client_ref(struct bps_client *client)
{
	client->refs++;
	return client;
}

/* What is left after bps_client_close() or a failed open: nobody else can reach it. */
struct bps_client *client_unref(struct bps_client *client)
{
	if (!client || --client->refs)
		return NULL;
	(void)pthread_cond_destroy(&client->waiting.over);
	(void)pthread_mutex_destroy(&client->mutex);
	for (unsigned i = 0; i < NOTICE_MAX_; i++)
		free(client->notices[i]);
	free(client->path);
	free(client);
	return NULL;
}

/* The daemon charges its memory to the user until nobody has it, and a child of fork() has no use for it. */
void *client_map(int fd, size_t len, off_t offset)
{
	void *data;

	client_fork_lock();
	data = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, fd, offset);
	if (data == MAP_FAILED)
		data = NULL;
	else
		(void)madvise(data, len, MADV_DONTFORK);
	client_fork_unlock();
	return data;
}

int client_watch(struct bps_client *client, int fd)
{
	struct epoll_event event = { .events = EPOLLIN, .data.fd = fd };

	if (epoll_ctl(client->epoll, EPOLL_CTL_ADD, fd, &event))
		return error_set(-errno, "cannot watch the daemon's descriptors: %m");
	return 0;
}

void client_notice(struct bps_client *client, enum notice which, const char *format, ...)
{
	char text[ERROR_TEXT_MAX + 1];
	va_list args;

	if (client->notices[which])
		return;
	va_start(args, format);
	(void)vsnprintf(text, sizeof(text), format, args);
	va_end(args);
	/* Without memory it is said the next time. */
	client->notices[which] = strdup(text);
}
