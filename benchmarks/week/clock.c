/* The simulated clock of benchmarks/week, loaded into every process of the job (LD_PRELOAD): what asks for the time gets
   the simulator's, and what sleeps waits until the simulator has come so far.

   LLMLAUNCH_WEEK_CLOCK is a file with one double, unix seconds; LLMLAUNCH_WEEK_SOCKET the simulator's socket. Each sleep
   is a connection of its own, since processes fork and close what they do not know. Not covered are timed waits for locks:
   they last until the lock is free, as the job's disk and SLURM do not hang here. */
#define _GNU_SOURCE
#include <alloca.h>
#include <ctype.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static volatile double *seconds_now;

__attribute__((constructor)) static void open_clock(void) {
    const char *path = getenv("LLMLAUNCH_WEEK_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *page = mmap(NULL, sizeof(double), PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) seconds_now = page;
    close(file);
}

static struct timespec simulated(void) {
    double now = *seconds_now;
    struct timespec time = {(time_t)now, (long)((now - (double)(time_t)now) * 1e9)};
    return time;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
    int is_process_time = clock < 0 || clock == CLOCK_PROCESS_CPUTIME_ID || clock == CLOCK_THREAD_CPUTIME_ID;
    if (!seconds_now || is_process_time) return (int)syscall(SYS_clock_gettime, clock, time);
    *time = simulated();
    return 0;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    (void)zone;
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result) *result = now.tv_sec;
    return now.tv_sec;
}

/* A connection that becomes readable when so many seconds have passed; -1 where the simulator is gone. `kind` is S for one
   who only sleeps, W for one who also waits for something else, and L for the loop of a program (epoll). */
static int begin_wait(char kind, double seconds) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    struct {
        char kind;
        int thread;
        double seconds;
    } request;
    memset(&request, 0, sizeof request);
    request.kind = kind;
    request.thread = (int)syscall(SYS_gettid);
    request.seconds = seconds;
    const char *path = getenv("LLMLAUNCH_WEEK_SOCKET");
    strncpy(address.sun_path, path ? path : "", sizeof address.sun_path - 1);
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0) return -1;
    if (connect(connection, (struct sockaddr *)&address, sizeof address) < 0 ||
        send(connection, &request, sizeof request, MSG_NOSIGNAL) < 0) {
        close(connection);
        return -1;
    }
    return connection;
}

static int sleep_for(const struct timespec *request, struct timespec *rest) {
    int connection = begin_wait('S', (double)request->tv_sec + (double)request->tv_nsec / 1e9);
    if (connection < 0) return (int)syscall(SYS_nanosleep, request, rest);
    char byte;
    ssize_t got = recv(connection, &byte, 1, 0);
    int interrupted = got < 0 && errno == EINTR;
    close(connection);
    if (!interrupted) return 0;
    if (rest) *rest = *request;
    errno = EINTR;
    return -1;
}

int nanosleep(const struct timespec *request, struct timespec *rest) {
    return seconds_now ? sleep_for(request, rest) : (int)syscall(SYS_nanosleep, request, rest);
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *request, struct timespec *rest) {
    struct timespec left = *request, now;
    if (!seconds_now) return syscall(SYS_clock_nanosleep, clock, flags, request, rest) < 0 ? errno : 0;
    if (flags & TIMER_ABSTIME) {
        clock_gettime(clock, &now);
        left.tv_sec -= now.tv_sec;
        left.tv_nsec -= now.tv_nsec;
        if (left.tv_nsec < 0) left.tv_sec--, left.tv_nsec += 1000000000;
        if (left.tv_sec < 0) return 0;
    }
    return sleep_for(&left, rest) < 0 ? errno : 0;
}

static int real_poll(struct pollfd *files, nfds_t count, int milliseconds) {
    struct timespec time = {milliseconds / 1000, milliseconds % 1000 * 1000000L};
    return (int)syscall(SYS_ppoll, files, count, milliseconds < 0 ? NULL : &time, NULL, _NSIG / 8);
}

/* As poll, by the simulator's clock. */
static int simulated_poll(char kind, struct pollfd *files, nfds_t count, int milliseconds) {
    struct pollfd *all = alloca((count + 1) * sizeof *all);
    int connection = begin_wait(kind, milliseconds / 1e3);
    if (connection < 0) return real_poll(files, count, milliseconds);
    if (count > 0) memcpy(all, files, count * sizeof *all);
    all[count] = (struct pollfd){connection, POLLIN, 0};
    int ready = real_poll(all, count + 1, -1);
    int error = errno;
    close(connection);
    errno = error;
    if (ready < 0) return ready;
    if (count > 0) memcpy(files, all, count * sizeof *all);
    return ready - (all[count].revents != 0);
}

int poll(struct pollfd *files, nfds_t count, int milliseconds) {
    int is_simulated = seconds_now && milliseconds > 0;
    return is_simulated ? simulated_poll('W', files, count, milliseconds) : real_poll(files, count, milliseconds);
}

int epoll_wait(int epoll, struct epoll_event *events, int most, int milliseconds) {
    if (seconds_now && milliseconds > 0) {
        struct pollfd file = {epoll, POLLIN, 0};
        if (simulated_poll('L', &file, 1, milliseconds) < 0) return -1;
        milliseconds = 0;
    }
    return (int)syscall(SYS_epoll_pwait, epoll, events, most, milliseconds, NULL, _NSIG / 8);
}

/* The nodes' names are known to nobody, and asking a server for them would be a wait that the simulator cannot see. */
int getaddrinfo(const char *name, const char *service, const struct addrinfo *hints, struct addrinfo **result) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    *(void **)&real = dlsym(RTLD_NEXT, "getaddrinfo");
    if (seconds_now && name && !isdigit((unsigned char)*name)) return EAI_NONAME;
    return real(name, service, hints, result);
}
