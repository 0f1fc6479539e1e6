/* A file server that is gone, or a disk that refuses, for one folder and one process: by LD_PRELOAD.
 *
 *   cc -std=c11 -Wall -Wextra -Werror -O1 -shared -fPIC -o faulty_disk.so faulty_disk.c -ldl
 *
 * FAULTY_UNDER  the folder; its calls fail as said in
 * FAULTY_HOW    this file, read at every call: `hang` waits until the file says something else, `hang writes` does so
 *               only where something is written, a number is the errno that writing fails with, empty or missing is a
 *               disk that is well.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

/* The errno that a call on `path` fails with, or 0; returns late where the server is gone. */
static int fault(const char *path, int writes)
{
    const char *under = getenv("FAULTY_UNDER"), *how = getenv("FAULTY_HOW");
    char text[32];
    if (!under || !how || !path || strncmp(path, under, strlen(under)))
        return 0;
    for (;;) {
        ssize_t length = 0;
        int file = REAL(int, "open64", const char *, int, ...)(how, O_RDONLY | O_CLOEXEC);
        if (file >= 0) {
            length = read(file, text, sizeof text - 1);
            close(file);
        }
        text[length > 0 ? length : 0] = 0;
        if (strncmp(text, "hang", 4) || (!writes && !strncmp(text, "hang w", 6)))
            return writes ? atoi(text) : 0;
        usleep(10000);
    }
}

static int fault_of(int descriptor)
{
    char link[64], path[PATH_MAX];
    ssize_t length;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    length = readlink(link, path, sizeof path - 1);
    path[length > 0 ? length : 0] = 0;
    return fault(path, 1);
}

static int open_here(const char *name, const char *path, int flags, mode_t mode)
{
    int code = fault(path, (flags & O_ACCMODE) != O_RDONLY);
    if (code) {
        errno = code;
        return -1;
    }
    return REAL(int, name, const char *, int, ...)(path, flags, mode);
}

#define OPEN(name)                                                                                                     \
    int name(const char *path, int flags, ...)                                                                         \
    {                                                                                                                  \
        mode_t mode = 0;                                                                                               \
        va_list more;                                                                                                  \
        va_start(more, flags);                                                                                         \
        if (flags & O_CREAT)                                                                                           \
            mode = va_arg(more, mode_t);                                                                               \
        va_end(more);                                                                                                  \
        return open_here(#name, path, flags, mode);                                                                    \
    }

OPEN(open)
OPEN(open64)

DIR *opendir(const char *path)
{
    fault(path, 0);
    return REAL(DIR *, "opendir", const char *)(path);
}

int mkdir(const char *path, mode_t mode)
{
    errno = fault(path, 1);
    return errno ? -1 : REAL(int, "mkdir", const char *, mode_t)(path, mode);
}

ssize_t write(int descriptor, const void *bytes, size_t count)
{
    errno = fault_of(descriptor);
    return errno ? -1 : REAL(ssize_t, "write", int, const void *, size_t)(descriptor, bytes, count);
}

int fsync(int descriptor)
{
    errno = fault_of(descriptor);
    return errno ? -1 : REAL(int, "fsync", int)(descriptor);
}
