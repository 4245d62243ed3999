/* Preloaded in front of pread, pwrite, unlink, unlinkat and clock_gettime: a drive that misbehaves on one file, or a wall clock.
 *
 *   FAULT_PATH    only files whose path ends so
 *   FAULT_OP      some of read, write, unlink; or clock, which concerns no file
 *   FAULT_KIND    short: every transfer is said to have moved at most SHORT_BYTES, and did not more than it had to
 *                 eintr: every other call is interrupted
 *                 late:  every third transfer takes longer, so that transfers end in another order than they began
 *                 hang:  transfers never end
 *                 jump:  every other look at the wall clock is a day earlier
 *                 flip:  one bit of the byte at FAULT_OFFSET is wrong
 *                 else an errno as a number: transfers end at FAULT_OFFSET, then fail; unlink fails
 *   FAULT_OFFSET  byte in the file; where it is not set, every transfer fails
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

#define SHORT_BYTES 5000
#define LATE_US 3000
#define DAY_S 86400

typedef ssize_t transfer(int, void *, size_t, off_t);

static atomic_uint calls;

static bool ends_so(const char *target, size_t length)
{
    const char *path = getenv("FAULT_PATH");
    size_t tail = path ? strlen(path) : 0;
    return path && length >= tail && !memcmp(target + length - tail, path, tail);
}

/* Where a descriptor leads; its length, or at most 0. */
static ssize_t path_of(int fd, char *target, size_t room)
{
    char link[64] = "/proc/self/fd/", digits[16];
    size_t at = sizeof digits - 1;
    digits[at] = 0;
    for (int rest = fd; rest || at == sizeof digits - 1; rest /= 10)
        digits[--at] = (char)('0' + rest % 10);
    strcat(link, digits + at);
    return readlink(link, target, room);
}

static bool concerned(int fd, const char *op)
{
    const char *wanted = getenv("FAULT_OP");
    char target[4096];
    if (!wanted || !strstr(wanted, op))
        return false;
    ssize_t length = path_of(fd, target, sizeof target);
    return length > 0 && ends_so(target, (size_t)length);
}

static ssize_t fault(transfer *real, int fd, void *address, size_t num_bytes, off_t offset)
{
    const char *kind = getenv("FAULT_KIND"), *at = getenv("FAULT_OFFSET");
    off_t fault_offset = at ? atoll(at) : 0;
    bool inside = !at || (offset <= fault_offset && fault_offset < offset + (off_t)num_bytes);
    if (!strcmp(kind, "eintr")) {
        if (atomic_fetch_add(&calls, 1) % 2)
            return real(fd, address, num_bytes, offset);
        errno = EINTR;
        return -1;
    }
    if (!strcmp(kind, "late")) {
        if (atomic_fetch_add(&calls, 1) % 3 == 0)
            usleep(LATE_US);
        return real(fd, address, num_bytes, offset);
    }
    if (!strcmp(kind, "hang"))
        for (;;)
            pause();
    if (!strcmp(kind, "short")) {
        if (num_bytes <= SHORT_BYTES)
            return real(fd, address, num_bytes, offset);
        size_t moved = fcntl(fd, F_GETFL) & O_DIRECT ? SHORT_BYTES / 4096 * 4096 : SHORT_BYTES;
        return real(fd, address, moved, offset) < 0 ? -1 : SHORT_BYTES;
    }
    if (!strcmp(kind, "flip")) {
        ssize_t moved = real(fd, address, num_bytes, offset);
        if (inside && moved > 0)
            ((char *)address)[fault_offset - offset] ^= 4;
        return moved;
    }
    if (!inside)
        return real(fd, address, num_bytes, offset);
    if (at && offset < fault_offset)
        return real(fd, address, (size_t)(fault_offset - offset), offset);
    errno = atoi(kind);
    return -1;
}

#define INTERPOSE(name, op, pointer)                                                                      \
    ssize_t name(int fd, pointer address, size_t num_bytes, off_t offset)                                 \
    {                                                                                                     \
        transfer *real = (transfer *)dlsym(RTLD_NEXT, #name);                                             \
        return concerned(fd, op) ? fault(real, fd, (void *)address, num_bytes, offset)                    \
                                 : real(fd, (void *)address, num_bytes, offset);                          \
    }

INTERPOSE(pread, "read", void *)
INTERPOSE(pread64, "read", void *)
INTERPOSE(pwrite, "write", const void *)
INTERPOSE(pwrite64, "write", const void *)

int unlink(const char *path)
{
    const char *wanted = getenv("FAULT_OP");
    int (*real)(const char *) = (int (*)(const char *))dlsym(RTLD_NEXT, "unlink");
    if (!wanted || !strstr(wanted, "unlink") || !ends_so(path, strlen(path)))
        return real(path);
    errno = atoi(getenv("FAULT_KIND"));
    return -1;
}

int unlinkat(int folder, const char *name, int flags)
{
    const char *wanted = getenv("FAULT_OP");
    int (*real)(int, const char *, int) = (int (*)(int, const char *, int))dlsym(RTLD_NEXT, "unlinkat");
    char target[8192];
    ssize_t length = folder == AT_FDCWD ? 0 : path_of(folder, target, sizeof target / 2);
    if (length < 0 || strlen(name) >= sizeof target / 2)
        return real(folder, name, flags);
    target[length] = '/';
    strcpy(target + length + 1, name);
    if (!wanted || !strstr(wanted, "unlink") || !ends_so(target, strlen(target)))
        return real(folder, name, flags);
    errno = atoi(getenv("FAULT_KIND"));
    return -1;
}

int clock_gettime(clockid_t clock, struct timespec *now)
{
    const char *wanted = getenv("FAULT_OP");
    int (*real)(clockid_t, struct timespec *) = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(clock, now);
    if (clock == CLOCK_REALTIME && wanted && strstr(wanted, "clock") && atomic_fetch_add(&calls, 1) % 2)
        now->tv_sec -= DAY_S;
    return code;
}
