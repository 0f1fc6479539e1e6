/* A command of SLURM (srun, scontrol, squeue, sinfo, scancel) as the job calls it: passes its words on to the simulator of
   benchmarks/week, and what comes on its standard input; prints what that says, and ends when that answers. A signal ends
   it, and the simulator sees that it is gone. */
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static char message[256 * 1024];

static size_t add(size_t length, const char *text) {
    size_t size = strlen(text) + 1;
    if (length + size > sizeof message) exit(126);
    memcpy(message + length, text, size);
    return length + size;
}

static int write_all(const char *text, size_t size) {
    while (size > 0) {
        ssize_t written = write(STDOUT_FILENO, text, size);
        if (written < 0 && errno != EINTR) return -1;
        if (written > 0) text += written, size -= (size_t)written;
    }
    return 0;
}

int main(int count, char **words) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    const char *name = strrchr(words[0], '/'), *path = getenv("LLMLAUNCH_WEEK_SOCKET");
    size_t length = 1;

    strncpy(address.sun_path, path ? path : "", sizeof address.sun_path - 1);
    int connection = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (connection < 0 || connect(connection, (struct sockaddr *)&address, sizeof address) < 0) return 127;
    message[0] = 'C';
    length = add(length, name ? name + 1 : words[0]);
    for (int each = 1; each < count; each++) length = add(length, words[each]);
    if (send(connection, message, length, MSG_NOSIGNAL) < 0) return 127;
    struct pollfd either[] = {{connection, POLLIN, 0}, {STDIN_FILENO, POLLIN, 0}};
    for (;;) {
        if (poll(either, 2, -1) < 0) continue;
        if (either[1].revents) {
            ssize_t got = read(STDIN_FILENO, message + 1, 64 * 1024);
            message[0] = 'I';
            if (got > 0) (void)!send(connection, message, (size_t)got + 1, MSG_NOSIGNAL);
            if (got == 0) either[1].fd = -1; /* nobody says any more */
        }
        if (either[0].revents) {
            ssize_t got = recv(connection, message, sizeof message, 0);
            if (got <= 1) return 127;
            int is_answer = message[0] == 'A', skipped = 1 + is_answer;
            if (write_all(message + skipped, (size_t)(got - skipped)) < 0) return 127;
            if (is_answer) return (unsigned char)message[1];
        }
    }
}
