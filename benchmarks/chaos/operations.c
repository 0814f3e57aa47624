/* Counts the file operations of one process below one folder, logs them with their data, kills the
 * process at one of them, or makes one fail. Preloaded (LD_PRELOAD), and armed by benchmarks.chaos.
 *
 * A record of the log is a header and, after it, the path, the other path of a rename, and data: of
 * a write what was written, of a sync everything that the file holds then, mapped writes included.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, LOG, KILL, FAIL, FAIL_ON };
enum { OPEN, WRITE, TRUNCATE, RENAME, UNLINK, MKDIR, RMDIR, SYNC, SYNC_FOLDER, READ, MARK };
enum { CREATED = 1, EMPTIED = 2 };

struct header {
    uint32_t operation, flags;
    uint64_t inode;
    int64_t offset;
    uint32_t path, other;
    uint64_t data;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char folder[PATH_MAX];
static int mode = OFF, error_number, log_descriptor = -1;
static long at, count;
static pid_t armed;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static ssize_t real_write(int fd, const void *data, size_t size) {
    REAL(write);
    return real(fd, data, size);
}

/* Everything below `below` counts; `log_path` may be NULL. Errors with FAIL_ON last, and hit only
 * what changes something. */
void chaos_arm(const char *below, const char *log_path, int how, long when, int error) {
    mode = OFF;
    if (log_path) {
        log_descriptor = open(log_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
        log_descriptor = fcntl(log_descriptor, F_DUPFD_CLOEXEC, 200);
    }
    snprintf(folder, sizeof folder, "%s/", below);
    at = when, error_number = error, count = 0, armed = getpid(), mode = how;
}

long chaos_count(void) { return count; }

static void put(const void *data, size_t size) {
    while (size) {
        ssize_t done = real_write(log_descriptor, data, size);
        if (done <= 0) _exit(99);
        data = (const char *)data + done, size -= done;
    }
}

static void record(struct header h, const char *path, const char *other, const void *data) {
    if (mode != LOG) return;
    h.path = path ? strlen(path) : 0, h.other = other ? strlen(other) : 0;
    put(&h, sizeof h);
    put(path, h.path), put(other, h.other), put(data, h.data);
}

void chaos_mark(const char *text) { record((struct header){.operation = MARK}, text, NULL, NULL); }

static int concerns(int directory, const char *name, char *path) {
    if (mode == OFF || getpid() != armed || !name) return 0;
    char link[64], base[PATH_MAX] = "";
    if (name[0] != '/') {
        if (directory == AT_FDCWD) {
            if (!getcwd(base, sizeof base)) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t length = readlink(link, base, sizeof base - 1);
            base[length < 0 ? 0 : length] = 0;
        }
        if (!name[0]) snprintf(path, PATH_MAX, "%s", base);
        else snprintf(path, PATH_MAX, "%.2000s/%.2000s", base, name);
    } else snprintf(path, PATH_MAX, "%s", name);
    return !strncmp(path, folder, strlen(folder)) ||
        (strlen(path) + 1 == strlen(folder) && !strncmp(path, folder, strlen(path)));
}

static int concerns_file(int fd, char *path, struct stat *facts) {
    int before = errno;
    int yes = mode != OFF && concerns(fd, "", path) && !fstat(fd, facts) &&
        (S_ISREG(facts->st_mode) || S_ISDIR(facts->st_mode));
    errno = before;
    return yes;
}

enum { READS, CHANGES, REMOVES };

/* Count an operation; returns whether it fails. `torn` is what to do of it before a kill. */
static int trip(int kind, int fd, const void *torn, size_t size) {
    if (mode != FAIL && kind == READS) return 0;
    if (kind == REMOVES && error_number == ENOSPC) return 0; /* which works on a full disk */
    count++;
    if (mode == KILL && count == at) {
        if (torn) real_write(fd, torn, size / 2);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if ((mode == FAIL && count == at) || (mode == FAIL_ON && count >= at)) {
        errno = error_number;
        return 1;
    }
    return 0;
}

#define ENTER pthread_mutex_lock(&mutex)
#define LEAVE pthread_mutex_unlock(&mutex)

static int opened(int (*how)(int, const char *, int, ...), int fd, const char *name, int flags,
                  mode_t bits) {
    char path[PATH_MAX];
    if (!concerns(fd, name, path)) return how(fd, name, flags, bits);
    int changes = (flags & (O_CREAT | O_TRUNC)) != 0;
    struct stat facts;
    int error = errno, existed = !stat(path, &facts);
    errno = error;
    if (existed && !(flags & O_TRUNC) && (flags & O_CREAT)) changes = 0;
    ENTER;
    /* On a read-only disk opening for writing fails, on a full one it does not. */
    int kind = changes || ((flags & O_ACCMODE) != O_RDONLY && error_number == EROFS) ? CHANGES : READS;
    int result = trip(kind, -1, NULL, 0) ? -1 : how(fd, name, flags, bits);
    if (result >= 0 && changes && !fstat(result, &facts)) {
        int what = (existed ? 0 : CREATED) | (flags & O_TRUNC ? EMPTIED : 0);
        record((struct header){.operation = OPEN, .flags = what, .inode = facts.st_ino}, path, NULL,
               NULL);
    }
    LEAVE;
    return result;
}

static int how_openat(int fd, const char *name, int flags, ...) {
    REAL(openat64);
    va_list list;
    va_start(list, flags);
    mode_t bits = va_arg(list, mode_t);
    va_end(list);
    return real(fd, name, flags, bits);
}

#define BITS \
    mode_t bits = 0; \
    if (flags & (O_CREAT | O_TMPFILE)) { \
        va_list list; \
        va_start(list, flags); \
        bits = va_arg(list, mode_t); \
        va_end(list); \
    }
int open(const char *name, int flags, ...) { BITS return opened(how_openat, AT_FDCWD, name, flags, bits); }
int open64(const char *name, int flags, ...) { BITS return opened(how_openat, AT_FDCWD, name, flags, bits); }
int openat(int fd, const char *name, int flags, ...) { BITS return opened(how_openat, fd, name, flags, bits); }
int openat64(int fd, const char *name, int flags, ...) { BITS return opened(how_openat, fd, name, flags, bits); }
int creat(const char *name, mode_t bits) { return opened(how_openat, AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, bits); }
int creat64(const char *name, mode_t bits) { return creat(name, bits); }

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    struct stat facts;
    if (mode == OFF || !concerns_file(fd, path, &facts)) return real_write(fd, data, size);
    ENTER;
    ssize_t result = -1;
    if (!trip(CHANGES, fd, data, size)) result = real_write(fd, data, size);
    else if (count == at && size > 1 && (error_number == ENOSPC || error_number == EIO)) {
        result = real_write(fd, data, size / 2); /* a full disk counts short, a broken one tears */
        if (error_number == EIO) errno = EIO, result = -1;
    }
    if (result > 0) {
        int64_t end = lseek(fd, 0, SEEK_CUR);
        record((struct header){.operation = WRITE, .inode = facts.st_ino, .offset = end - result,
                               .data = result}, path, NULL, data);
    }
    LEAVE;
    return result;
}

/* One buffer after the other: a short count is what callers must expect. */
ssize_t writev(int fd, const struct iovec *parts, int number) {
    char path[PATH_MAX];
    struct stat facts;
    if (mode == OFF || !concerns_file(fd, path, &facts)) {
        REAL(writev);
        return real(fd, parts, number);
    }
    for (int i = 0; i < number; i++)
        if (parts[i].iov_len) return write(fd, parts[i].iov_base, parts[i].iov_len);
    return 0;
}

static ssize_t written_at(int fd, const void *data, size_t size, off64_t offset) {
    REAL(pwrite64);
    char path[PATH_MAX];
    struct stat facts;
    if (mode == OFF || !concerns_file(fd, path, &facts)) return real(fd, data, size, offset);
    ENTER;
    ssize_t result = trip(CHANGES, -1, NULL, 0) ? -1 : real(fd, data, size, offset);
    if (result > 0)
        record((struct header){.operation = WRITE, .inode = facts.st_ino, .offset = offset,
                               .data = result}, path, NULL, data);
    LEAVE;
    return result;
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return written_at(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return written_at(fd, data, size, offset); }

static int cut(int fd, off64_t size) {
    REAL(ftruncate64);
    char path[PATH_MAX];
    struct stat facts;
    if (mode == OFF || !concerns_file(fd, path, &facts)) return real(fd, size);
    ENTER;
    int result = trip(CHANGES, -1, NULL, 0) ? -1 : real(fd, size);
    if (!result)
        record((struct header){.operation = TRUNCATE, .inode = facts.st_ino, .offset = size}, path,
               NULL, NULL);
    LEAVE;
    return result;
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off64_t size) { return cut(fd, size); }

int truncate64(const char *name, off64_t size) {
    REAL(truncate64);
    char path[PATH_MAX];
    if (!concerns(AT_FDCWD, name, path)) return real(name, size);
    struct stat facts = {0};
    ENTER;
    int result = trip(CHANGES, -1, NULL, 0) ? -1 : real(name, size);
    if (!result && !stat(path, &facts))
        record((struct header){.operation = TRUNCATE, .inode = facts.st_ino, .offset = size}, path,
               NULL, NULL);
    LEAVE;
    return result;
}
int truncate(const char *name, off_t size) { return truncate64(name, size); }

int renameat(int from, const char *old, int to, const char *new) {
    REAL(renameat);
    char path[PATH_MAX], other[PATH_MAX];
    if (!concerns(from, old, path) || !concerns(to, new, other)) return real(from, old, to, new);
    ENTER;
    int result = trip(CHANGES, -1, NULL, 0) ? -1 : real(from, old, to, new);
    if (!result) record((struct header){.operation = RENAME}, path, other, NULL);
    LEAVE;
    return result;
}
int rename(const char *old, const char *new) { return renameat(AT_FDCWD, old, AT_FDCWD, new); }

int unlinkat(int fd, const char *name, int flags) {
    REAL(unlinkat);
    char path[PATH_MAX];
    if (!concerns(fd, name, path)) return real(fd, name, flags);
    ENTER;
    int result = trip(REMOVES, -1, NULL, 0) ? -1 : real(fd, name, flags);
    if (!result)
        record((struct header){.operation = flags & AT_REMOVEDIR ? RMDIR : UNLINK}, path, NULL, NULL);
    LEAVE;
    return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int remove(const char *name) {
    struct stat facts;
    return unlinkat(AT_FDCWD, name, !lstat(name, &facts) && S_ISDIR(facts.st_mode) ? AT_REMOVEDIR : 0);
}
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

int mkdirat(int fd, const char *name, mode_t bits) {
    REAL(mkdirat);
    char path[PATH_MAX];
    struct stat facts = {0};
    if (!concerns(fd, name, path)) return real(fd, name, bits);
    ENTER;
    int result = trip(CHANGES, -1, NULL, 0) ? -1 : real(fd, name, bits);
    if (!result && !stat(path, &facts))
        record((struct header){.operation = MKDIR, .inode = facts.st_ino}, path, NULL, NULL);
    LEAVE;
    return result;
}
int mkdir(const char *name, mode_t bits) { return mkdirat(AT_FDCWD, name, bits); }

static int synced(int (*how)(int), int fd) {
    char path[PATH_MAX];
    struct stat facts;
    if (mode == OFF || !concerns_file(fd, path, &facts)) return how(fd);
    ENTER;
    int result = trip(CHANGES, -1, NULL, 0) ? -1 : how(fd);
    if (!result && mode == LOG) {
        struct header h = {.operation = SYNC_FOLDER, .inode = facts.st_ino};
        char *data = NULL;
        if (S_ISREG(facts.st_mode) && !fstat(fd, &facts)) {
            /* The descriptor may be for writing only. */
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
            int reader = how_openat(AT_FDCWD, link, O_RDONLY | O_CLOEXEC, 0);
            data = malloc(facts.st_size + 1);
            h.operation = SYNC;
            h.data = facts.st_size ? pread(reader, data, facts.st_size, 0) : 0;
            close(reader);
        }
        record(h, path, NULL, data);
        free(data);
    }
    LEAVE;
    return result;
}
static int how_fsync(int fd) { REAL(fsync); return real(fd); }
static int how_fdatasync(int fd) { REAL(fdatasync); return real(fd); }
int fsync(int fd) { return synced(how_fsync, fd); }
int fdatasync(int fd) { return synced(how_fdatasync, fd); }
