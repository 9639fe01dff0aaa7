/* Counts the calls of a process that touch files below one folder, and has the n-th of them fail, or
 * kill the process. Preloaded (LD_PRELOAD), it sees what every thread asks of the C library, native
 * ones too: what Python's `os` can be patched for is not what TensorStore writes.
 *
 * What it is to do stands in a file that driver and processes map (CAIRN_FAULT_CONTROL), so that a
 * driver arms it at any moment, and reads how far a process got that was killed. `failing_calls.py`
 * lays the same fields out.
 *
 * Not seen: calls made past the C library (`syscall`, io_uring) and within it (`fopen`). Of a save,
 * strace sees no call that changes the disk and is not counted here.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CHANGE = 1, READ = 2 };
enum { FOLDER_BYTES = 1024, LOG_BYTES = 1 << 20, PATH_BYTES = 2 * PATH_MAX };
enum { KILL = -1, HERE = -1 };

struct control {
    char folder[FOLDER_BYTES]; /* absolute, without links and without a slash at its end */
    int32_t kinds;             /* which calls count: CHANGE, READ or both */
    int32_t error;             /* errno of the call that fails; KILL; 0: calls are only counted */
    int64_t at;                /* which call fails, from 1 on; 0: none is counted */
    int64_t lasts;             /* whether all after it fail, too */
    int64_t calls;             /* so many there were */
    int64_t failed;            /* so many of them failed */
    int64_t logged;            /* bytes of the log that are taken */
    char log[LOG_BYTES];       /* a line for each call: number, name, path */
};

static struct control *control;

/* What the library itself calls. */
static int (*next_open)(const char *, int, ...);
static ssize_t (*next_readlink)(const char *, char *, size_t);
static ssize_t (*next_pwrite)(int, const void *, size_t, off_t);

__attribute__((constructor)) static void map_control(void) {
    next_open = dlsym(RTLD_NEXT, "open");
    next_readlink = dlsym(RTLD_NEXT, "readlink");
    next_pwrite = dlsym(RTLD_NEXT, "pwrite");
    const char *name = getenv("CAIRN_FAULT_CONTROL");
    if (name == NULL) return;
    int file = next_open(name, O_RDWR | O_CLOEXEC);
    void *mapped = file < 0 ? MAP_FAILED
                            : mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) {
        perror(name);
        abort(); /* else a walk would find that nothing ever fails */
    }
    close(file);
    control = mapped;
}

/* The path of an open file or folder; "" of what has none. */
static void path_of(int file, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = next_readlink(link, path, PATH_MAX);
    path[size > 0 ? size : 0] = 0;
}

/* The path that a call names. Cairn opens a folder first, and names what is in it by its
 * descriptor: as `dirfd`, or as /proc/self/fd/N/name. */
static void path_at(int folder, const char *name, char *path) {
    int number, size = 0;
    if (name == NULL) name = "";
    if (sscanf(name, "/proc/self/fd/%d%n", &number, &size) == 1 && strchr("/", name[size])) {
        path_of(number, path);
        strncat(path, name + size, PATH_MAX);
    } else if (name[0] == '/') {
        snprintf(path, PATH_BYTES, "%s", name);
    } else {
        if (folder != AT_FDCWD) path_of(folder, path);
        else if (getcwd(path, PATH_MAX) == NULL) path[0] = 0;
        strncat(path, "/", 2);
        strncat(path, name, PATH_MAX);
    }
}

static int is_below(const char *path) {
    size_t size = strlen(control->folder);
    return strncmp(path, control->folder, size) == 0 && strchr("/", path[size]) != NULL;
}

static int is_armed(void) { return control && __atomic_load_n(&control->at, __ATOMIC_ACQUIRE) > 0; }

static void note(int64_t number, const char *call, const char *path) {
    char line[PATH_BYTES + 64];
    int size = snprintf(line, sizeof line, "%ld %s %s\n", (long)number, call, path);
    int64_t start = __atomic_fetch_add(&control->logged, size, __ATOMIC_RELAXED);
    if (start + size < LOG_BYTES) memcpy(control->log + start, line, size);
}

/* Whether this call fails, with `errno` set. One that is to die does so here: of what it was about
 * to write (`bytes`, if it writes), the first half is there then. */
static int fails(int kind, const char *call, const char *path, int file, const void *bytes,
                 size_t size, off_t place) {
    if (!(control->kinds & kind) || !is_below(path)) return 0;
    int64_t number = __atomic_add_fetch(&control->calls, 1, __ATOMIC_ACQ_REL);
    note(number, call, path);
    if (control->error == 0) return 0;
    if (control->lasts ? number < control->at : number != control->at) return 0;
    __atomic_add_fetch(&control->failed, 1, __ATOMIC_ACQ_REL);
    if (control->error == KILL) {
        if (bytes != NULL && place == HERE) place = lseek(file, 0, SEEK_CUR);
        if (bytes != NULL && place >= 0) next_pwrite(file, bytes, size / 2, place);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    errno = control->error;
    return 1;
}

#define NOTHING_WRITTEN 0, NULL, 0, 0

/* A function of the C library, with what it is told in front of it. `find` writes the path. */
#define WRAP(type, failure, kind, name, parameters, arguments, find, ...)              \
    type name parameters {                                                             \
        static __typeof__(&name) next;                                                 \
        char path[PATH_BYTES];                                                         \
        if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name);           \
        if (is_armed()) {                                                              \
            find;                                                                      \
            if (fails(kind, #name, path, __VA_ARGS__)) return failure;                 \
        }                                                                              \
        return next arguments;                                                         \
    }
#define ON_FILE(type, kind, name, parameters, arguments) \
    WRAP(type, -1, kind, name, parameters, arguments, path_of(file, path), NOTHING_WRITTEN)
#define ON_PATH(kind, name, parameters, arguments) \
    WRAP(int, -1, kind, name, parameters, arguments, path_at(AT_FDCWD, at, path), NOTHING_WRITTEN)
#define ON_PATH_AT(kind, name, parameters, arguments) \
    WRAP(int, -1, kind, name, parameters, arguments, path_at(folder, at, path), NOTHING_WRITTEN)

/* What makes a file, or may write it, is a change; what opens one to read it, or a folder to sync
 * it, is not. */
#define OPEN(name, parameters, folder, ...)                                                  \
    int name parameters {                                                                    \
        static int (*next) parameters;                                                       \
        char path[PATH_BYTES];                                                               \
        mode_t mode = 0;                                                                     \
        if (flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE) {                           \
            va_list rest;                                                                    \
            va_start(rest, flags);                                                           \
            mode = va_arg(rest, mode_t);                                                     \
            va_end(rest);                                                                    \
        }                                                                                    \
        if (next == NULL) next = (int(*) parameters)dlsym(RTLD_NEXT, #name);                 \
        if (is_armed()) {                                                                    \
            int reads = (flags & O_ACCMODE) == O_RDONLY && !(flags & (O_CREAT | O_TRUNC));   \
            path_at(folder, at, path);                                                       \
            if (fails(reads ? READ : CHANGE, #name, path, NOTHING_WRITTEN)) return -1;            \
        }                                                                                    \
        return next(__VA_ARGS__, flags, mode);                                               \
    }
OPEN(open, (const char *at, int flags, ...), AT_FDCWD, at)
OPEN(open64, (const char *at, int flags, ...), AT_FDCWD, at)
OPEN(openat, (int folder, const char *at, int flags, ...), folder, folder, at)
OPEN(openat64, (int folder, const char *at, int flags, ...), folder, folder, at)
ON_PATH(CHANGE, creat, (const char *at, mode_t mode), (at, mode))
ON_PATH(CHANGE, creat64, (const char *at, mode_t mode), (at, mode))

WRAP(ssize_t, -1, CHANGE, write, (int file, const void *bytes, size_t size), (file, bytes, size),
     path_of(file, path), file, bytes, size, HERE)
WRAP(ssize_t, -1, CHANGE, writev, (int file, const struct iovec *parts, int count),
     (file, parts, count), path_of(file, path), file, parts->iov_base, parts->iov_len, HERE)
#define PWRITE(name)                                                                         \
    WRAP(ssize_t, -1, CHANGE, name, (int file, const void *bytes, size_t size, off_t place), \
         (file, bytes, size, place), path_of(file, path), file, bytes, size, place)
PWRITE(pwrite)
PWRITE(pwrite64)
#define VECTORS(kind, name)                                                                  \
    ON_FILE(ssize_t, kind, name, (int file, const struct iovec *parts, int count), (file, parts, count))
#define VECTORS_AT(kind, name)                                                               \
    ON_FILE(ssize_t, kind, name, (int file, const struct iovec *parts, int count, off_t place), \
            (file, parts, count, place))
#define VECTORS_AT_HOW(kind, name)                                                           \
    ON_FILE(ssize_t, kind, name,                                                             \
            (int file, const struct iovec *parts, int count, off_t place, int how),          \
            (file, parts, count, place, how))
VECTORS_AT(CHANGE, pwritev)
VECTORS_AT(CHANGE, pwritev64)
VECTORS_AT_HOW(CHANGE, pwritev2)
VECTORS_AT_HOW(CHANGE, pwritev64v2)
#define SENDFILE(name)                                                                       \
    ON_FILE(ssize_t, CHANGE, name, (int file, int source, off_t *place, size_t size),        \
            (file, source, place, size))
SENDFILE(sendfile)
SENDFILE(sendfile64)
ON_FILE(ssize_t, CHANGE, copy_file_range,
        (int source, off_t *from, int file, off_t *to, size_t size, unsigned how),
        (source, from, file, to, size, how))

ON_FILE(int, CHANGE, fsync, (int file), (file))
ON_FILE(int, CHANGE, fdatasync, (int file), (file))
ON_FILE(int, CHANGE, sync_file_range, (int file, off_t place, off_t size, unsigned how),
        (file, place, size, how))
ON_FILE(int, CHANGE, ftruncate, (int file, off_t size), (file, size))
ON_FILE(int, CHANGE, ftruncate64, (int file, off_t size), (file, size))
ON_FILE(int, CHANGE, fallocate, (int file, int mode, off_t place, off_t size), (file, mode, place, size))
ON_FILE(int, CHANGE, fallocate64, (int file, int mode, off_t place, off_t size), (file, mode, place, size))
#define ALLOCATE(name) /* returns the error */                                               \
    WRAP(int, errno, CHANGE, name, (int file, off_t place, off_t size), (file, place, size), \
         path_of(file, path), NOTHING_WRITTEN)
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)
ON_FILE(int, CHANGE, fchmod, (int file, mode_t mode), (file, mode))
ON_FILE(int, CHANGE, futimens, (int file, const struct timespec times[2]), (file, times))

ON_PATH(CHANGE, mkdir, (const char *at, mode_t mode), (at, mode))
ON_PATH_AT(CHANGE, mkdirat, (int folder, const char *at, mode_t mode), (folder, at, mode))
ON_PATH(CHANGE, rmdir, (const char *at), (at))
ON_PATH(CHANGE, unlink, (const char *at), (at))
ON_PATH_AT(CHANGE, unlinkat, (int folder, const char *at, int how), (folder, at, how))
ON_PATH(CHANGE, truncate, (const char *at, off_t size), (at, size))
ON_PATH(CHANGE, truncate64, (const char *at, off_t size), (at, size))
ON_PATH(CHANGE, chmod, (const char *at, mode_t mode), (at, mode))
ON_PATH_AT(CHANGE, fchmodat, (int folder, const char *at, mode_t mode, int how), (folder, at, mode, how))
ON_PATH_AT(CHANGE, utimensat, (int folder, const char *at, const struct timespec times[2], int how),
           (folder, at, times, how))
/* Of two names the new one is told. */
ON_PATH(CHANGE, rename, (const char *old, const char *at), (old, at))
ON_PATH(CHANGE, link, (const char *old, const char *at), (old, at))
ON_PATH(CHANGE, symlink, (const char *old, const char *at), (old, at))
ON_PATH_AT(CHANGE, symlinkat, (const char *old, int folder, const char *at), (old, folder, at))
ON_PATH_AT(CHANGE, renameat, (int from, const char *old, int folder, const char *at),
           (from, old, folder, at))
ON_PATH_AT(CHANGE, renameat2, (int from, const char *old, int folder, const char *at, unsigned how),
           (from, old, folder, at, how))
ON_PATH_AT(CHANGE, linkat, (int from, const char *old, int folder, const char *at, int how),
           (from, old, folder, at, how))

ON_FILE(ssize_t, READ, read, (int file, void *bytes, size_t size), (file, bytes, size))
ON_FILE(ssize_t, READ, pread, (int file, void *bytes, size_t size, off_t place), (file, bytes, size, place))
ON_FILE(ssize_t, READ, pread64, (int file, void *bytes, size_t size, off_t place), (file, bytes, size, place))
VECTORS(READ, readv)
VECTORS_AT(READ, preadv)
VECTORS_AT(READ, preadv64)
VECTORS_AT_HOW(READ, preadv2)
VECTORS_AT_HOW(READ, preadv64v2)
WRAP(DIR *, NULL, READ, opendir, (const char *at), (at), path_at(AT_FDCWD, at, path), NOTHING_WRITTEN)
WRAP(DIR *, NULL, READ, fdopendir, (int file), (file), path_of(file, path), NOTHING_WRITTEN)
#define STAT(name, parts)                                                                    \
    ON_PATH(READ, name, (const char *restrict at, struct parts *restrict status), (at, status))
#define STAT_AT(name, parts)                                                                 \
    ON_PATH_AT(READ, name,                                                                   \
               (int folder, const char *restrict at, struct parts *restrict status, int how), \
               (folder, at, status, how))
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)
STAT_AT(fstatat, stat)
STAT_AT(fstatat64, stat64)
/* As programs call them that were built with a C library before 2.33; it declares them no more. */
#define OLD_STAT(name, parts)                                                                \
    int name(int version, const char *at, struct parts *status);                             \
    ON_PATH(READ, name, (int version, const char *at, struct parts *status), (version, at, status))
OLD_STAT(__xstat, stat)
OLD_STAT(__xstat64, stat64)
OLD_STAT(__lxstat, stat)
OLD_STAT(__lxstat64, stat64)
int __fxstatat(int version, int folder, const char *at, struct stat *status, int how);
ON_PATH_AT(READ, __fxstatat, (int version, int folder, const char *at, struct stat *status, int how),
           (version, folder, at, status, how))
