/* A command of SLURM (srun, scontrol, squeue, sinfo, scancel) as the job calls it: passes its words on to the simulator of
   benchmarks/week, prints what that answers, and ends when that says so. Signals are passed on, as srun does. */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static int connection;

static void pass_on(int number) {
    char message[] = {'N', (char)number};
    int before = errno;
    (void)!send(connection, message, sizeof message, MSG_NOSIGNAL);
    errno = before;
}

static size_t add(char *request, size_t length, size_t most, const char *text) {
    size_t size = strlen(text) + 1;
    if (length + size > most) exit(126);
    memcpy(request + length, text, size);
    return length + size;
}

int main(int count, char **words) {
    static char request[128 * 1024], answer[128 * 1024];
    const char *passed[] = {"LLMLAUNCH_ATTEMPT", "LLMLAUNCH_NODE_RANKS"};
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const int signals[] = {SIGTERM, SIGUSR1, SIGUSR2, SIGINT, SIGHUP};
    struct sigaction action = {.sa_handler = pass_on};
    const char *name = strrchr(words[0], '/'), *path = getenv("LLMLAUNCH_WEEK_SOCKET");
    size_t length = 1;

    strncpy(address.sun_path, path ? path : "", sizeof address.sun_path - 1);
    connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) < 0) return 127;
    for (size_t each = 0; each < sizeof signals / sizeof *signals; each++) sigaction(signals[each], &action, NULL);
    request[0] = 'C';
    length += (size_t)snprintf(request + length, 32, "%d", (int)getpid()) + 1;
    for (size_t each = 0; each < sizeof passed / sizeof *passed; each++) {
        const char *value = getenv(passed[each]);
        length = add(request, length, sizeof request, value ? value : "");
    }
    length = add(request, length, sizeof request, name ? name + 1 : words[0]);
    for (int each = 1; each < count; each++) length = add(request, length, sizeof request, words[each]);
    if (send(connection, request, length, MSG_NOSIGNAL) < 0) return 127;
    for (;;) {
        ssize_t got = recv(connection, answer, sizeof answer, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return 127;
        fwrite(answer + 1, 1, (size_t)got - 1, stdout);
        fflush(stdout);
        return (unsigned char)answer[0];
    }
}
