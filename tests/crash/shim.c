/* A shim over the file-system calls of one process, below one root.
 *
 * Preloaded (LD_PRELOAD, Linux only), it numbers every call that changes something below
 * the root, SQLite's too, and by its orders kills the process before call N, or in the
 * middle of it, fails calls, slows them down, or writes each one with its data to a log.
 *
 * Orders are one text of KEY=VALUE separated by spaces or newlines: given to shim_arm(),
 * or in CRASH_SHIM; with control=FILE that file is read again before every call.
 *
 *   root=DIR    absolute, without links; nothing is counted without it
 *   log=FILE    outside of the root; see recording.py for its records
 *   kill=N      SIGKILL before step N        half=1   after half of the write of step N
 *   fail=N      step N fails                 errno=E  with this number
 *   sticky=1    all later steps too          delay=U  microseconds before each step
 *   ops=A,B     only these calls fail        path=S   only paths that contain S
 *   swallow=all|index|blobs  flushes of these files never happened, nor are they counted
 *   sync=0      flushes are counted and logged, and not done: no power will be cut
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
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define REAL(type, name, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

enum op { OPEN, CREATE, WRITE, TRUNCATE, FSYNC, RENAME, LINK, UNLINK, RMDIR, MKDIR,
          CHMOD, NOTE };
static const char *const NAMES[] = {"open", "create", "write", "truncate", "fsync",
    "rename", "link", "unlink", "rmdir", "mkdir", "chmod", "note"};

enum verdict { OUTSIDE, GO, FAIL, HALF, SWALLOW };

static struct {
    char root[PATH_MAX], log[PATH_MAX], control[PATH_MAX];
    char ops[256], path[256], swallow[16];
    long kill, fail, half, sticky, error, delay, sync;
} orders;
static int log_fd = -1;
static long steps;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

struct record {
    uint32_t magic, op;
    uint64_t step, inode;
    int64_t offset;
    uint32_t path_size, other_size;
    uint64_t data_size;
};

/* Orders. */

static void take(char *text) {
    struct { const char *key; char *to; size_t size; } texts[] = {
        {"root", orders.root, sizeof orders.root},
        {"log", orders.log, sizeof orders.log},
        {"control", orders.control, sizeof orders.control},
        {"ops", orders.ops, sizeof orders.ops},
        {"path", orders.path, sizeof orders.path},
        {"swallow", orders.swallow, sizeof orders.swallow},
    };
    struct { const char *key; long *to; } numbers[] = {
        {"kill", &orders.kill}, {"fail", &orders.fail}, {"half", &orders.half},
        {"sticky", &orders.sticky}, {"errno", &orders.error},
        {"delay", &orders.delay}, {"sync", &orders.sync},
    };
    char *rest = NULL;
    for (char *part = strtok_r(text, " \n", &rest); part;
         part = strtok_r(NULL, " \n", &rest)) {
        char *value = strchr(part, '=');
        if (!value) continue;
        *value++ = 0;
        for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
            if (!strcmp(part, texts[i].key))
                snprintf(texts[i].to, texts[i].size, "%s", value);
        for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
            if (!strcmp(part, numbers[i].key)) *numbers[i].to = atol(value);
    }
}

static void obey(const char *given) {
    static char text[4 * PATH_MAX];
    snprintf(text, sizeof text, "%s", given);
    take(text);
}

/* What the control file says replaces what is to fail and how. */
static void read_control(void) {
    static char text[4096];
    int fd = (int)syscall(SYS_openat, AT_FDCWD, orders.control, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    ssize_t size = syscall(SYS_read, fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    if (size < 0) return;
    text[size] = 0;
    orders.kill = orders.fail = orders.half = orders.sticky = orders.delay = 0;
    orders.ops[0] = orders.path[0] = 0;
    take(text);
}

void shim_arm(const char *text) {
    pthread_mutex_lock(&lock);
    memset(&orders, 0, sizeof orders);
    orders.sync = 1;
    steps = 0;
    if (log_fd >= 0) syscall(SYS_close, log_fd);
    log_fd = -1;
    obey(text);
    if (orders.log[0])
        log_fd = (int)syscall(SYS_openat, AT_FDCWD, orders.log,
                              O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    pthread_mutex_unlock(&lock);
}

long shim_steps(void) { return steps; }

__attribute__((constructor)) static void begin(void) {
    const char *text = getenv("CRASH_SHIM");
    if (text) shim_arm(text);
}

/* Paths. */

static int of_fd(int fd, char *out) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, name, out, PATH_MAX - 1);
    if (size < 0) size = 0;
    out[size] = 0;
    return size > 0;
}

static void resolve(int directory, const char *path, char *out) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (directory == AT_FDCWD) {
        if (!getcwd(out, PATH_MAX)) out[0] = 0;
    } else if (!of_fd(directory, out)) {
        out[0] = 0;
    }
    size_t used = strlen(out);
    snprintf(out + used, PATH_MAX - used, "/%s", path);
}

static int below(const char *path) {
    size_t size = strlen(orders.root);
    return size && !strncmp(path, orders.root, size) &&
           (path[size] == '/' || path[size] == 0);
}

static int listed(enum op op) {
    if (!orders.ops[0]) return 1;
    size_t size = strlen(NAMES[op]);
    for (const char *at = orders.ops; (at = strstr(at, NAMES[op])); at += size)
        if ((at == orders.ops || at[-1] == ',') && (!at[size] || at[size] == ','))
            return 1;
    return 0;
}

/* Steps: `enter` locks and says what to do, `leave` logs what was done and unlocks. */

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static enum verdict enter(enum op op, const char *path, const char *other) {
    if (!orders.root[0] || !(below(path) || (other && below(other)))) return OUTSIDE;
    if (orders.delay) usleep((useconds_t)orders.delay);
    pthread_mutex_lock(&lock);
    if (orders.control[0]) read_control();
    if (op == FSYNC && orders.swallow[0]) {
        const char *kind = strstr(path, ".sqlite") ? "index" : "blobs";
        if (!strcmp(orders.swallow, "all") || !strcmp(orders.swallow, kind)) {
            pthread_mutex_unlock(&lock);
            return SWALLOW;
        }
    }
    steps++;
    if (steps == orders.kill) {
        if (op == WRITE && orders.half) return HALF;
        die();
    }
    int due = steps == orders.fail || (orders.sticky && steps > orders.fail);
    if (orders.fail && due && listed(op) &&
        (!orders.path[0] || strstr(path, orders.path))) {
        if (op == WRITE && orders.half && steps == orders.fail) return HALF;
        pthread_mutex_unlock(&lock);
        errno = (int)orders.error;
        return FAIL;
    }
    return GO;
}

static void put(enum op op, uint64_t inode, int64_t offset, const char *path,
                const char *other, const void *data, size_t size) {
    if (log_fd < 0) return;
    struct record head = {0x53544550, op, (uint64_t)steps, inode, offset,
                          (uint32_t)strlen(path), (uint32_t)strlen(other), size};
    struct iovec parts[] = {{&head, sizeof head},
                            {(void *)path, head.path_size},
                            {(void *)other, head.other_size},
                            {(void *)data, size}};
    if (syscall(SYS_writev, log_fd, parts, 4) < 0) abort();
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) ? 0 : found.st_ino;
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return lstat(path, &found) ? 0 : found.st_ino;
}

static void leave(void) {
    int kept = errno;
    pthread_mutex_unlock(&lock);
    errno = kept;
}

void shim_note(const char *text) {
    pthread_mutex_lock(&lock);
    put(NOTE, 0, 0, "", "", text, strlen(text));
    pthread_mutex_unlock(&lock);
}

/* Opening. */

static int open_any(int directory, const char *path, int flags, mode_t mode) {
    REAL(int, "openat64", int, const char *, int, ...);
    char full[PATH_MAX];
    if ((flags & O_ACCMODE) == O_RDONLY && !(flags & (O_CREAT | O_TRUNC)))
        return real(directory, path, flags, mode);
    resolve(directory, path, full);
    uint64_t before = inode_at(full);
    int creates = !before && (flags & O_CREAT);
    enum verdict verdict = enter(creates ? CREATE : OPEN, full, NULL);
    if (verdict == FAIL) return -1;
    int fd = real(directory, path, flags, mode);
    if (verdict == OUTSIDE) return fd;
    if (fd >= 0 && creates) put(CREATE, inode_of(fd), 0, full, "", "", 0);
    if (fd >= 0 && before && (flags & O_TRUNC))
        put(TRUNCATE, before, 0, full, "", "", 0);
    leave();
    return fd;
}

#define MODE(flags, mode) \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { \
        va_list rest; \
        va_start(rest, flags); \
        mode = va_arg(rest, mode_t); \
        va_end(rest); \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_any(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_any(AT_FDCWD, path, flags | O_LARGEFILE, mode);
}
int openat(int directory, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_any(directory, path, flags, mode);
}
int openat64(int directory, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_any(directory, path, flags | O_LARGEFILE, mode);
}

/* Writing; everything goes through pwrite or write of one buffer. */

static ssize_t write_any(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    int placed = offset >= 0;
    off_t at = placed ? offset : 0;
    enum verdict verdict = of_fd(fd, path) ? enter(WRITE, path, NULL) : OUTSIDE;
    if (verdict == FAIL) return -1;
    if (verdict == HALF) size = (size + 1) / 2;
    if (verdict != OUTSIDE && !placed) at = lseek(fd, 0, SEEK_CUR);
    ssize_t done = placed ? syscall(SYS_pwrite64, fd, data, size, offset)
                          : syscall(SYS_write, fd, data, size);
    if (verdict == OUTSIDE) return done;
    if (verdict == HALF && steps == orders.kill) die();
    if (done > 0) put(WRITE, inode_of(fd), at, path, "", data, (size_t)done);
    leave();
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    return write_any(fd, data, size, -1);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    return write_any(fd, data, size, offset);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return write_any(fd, data, size, offset);
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, "writev", int, const struct iovec *, int);
    char path[PATH_MAX];
    if (!of_fd(fd, path) || !orders.root[0] || !below(path))
        return real(fd, parts, count);
    size_t size = 0;
    for (int i = 0; i < count; i++) size += parts[i].iov_len;
    char *data = malloc(size + 1), *at = data;
    for (int i = 0; i < count; i++) {
        memcpy(at, parts[i].iov_base, parts[i].iov_len);
        at += parts[i].iov_len;
    }
    ssize_t done = write_any(fd, data, size, -1);
    int kept = errno;
    free(data);
    errno = kept;
    return done;
}

int ftruncate64(int fd, off64_t size) {
    char path[PATH_MAX];
    enum verdict verdict = of_fd(fd, path) ? enter(TRUNCATE, path, NULL) : OUTSIDE;
    if (verdict == FAIL) return -1;
    int done = (int)syscall(SYS_ftruncate, fd, size);
    if (verdict == OUTSIDE) return done;
    if (!done) put(TRUNCATE, inode_of(fd), size, path, "", "", 0);
    leave();
    return done;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

/* Flushing. */

static int sync_any(int fd, long call) {
    char path[PATH_MAX];
    enum verdict verdict = of_fd(fd, path) ? enter(FSYNC, path, NULL) : OUTSIDE;
    if (verdict == FAIL) return -1;
    if (verdict == SWALLOW) return 0;
    if (verdict == OUTSIDE) return (int)syscall(call, fd);
    int done = orders.sync ? (int)syscall(call, fd) : 0;
    if (!done) put(FSYNC, inode_of(fd), 0, path, "", "", 0);
    leave();
    return done;
}
int fsync(int fd) { return sync_any(fd, SYS_fsync); }
int fdatasync(int fd) { return sync_any(fd, SYS_fdatasync); }

/* Names. */

static int two_any(enum op op, int from, const char *old, int to, const char *new,
                   unsigned flags) {
    char path[PATH_MAX], other[PATH_MAX];
    resolve(from, old, path);
    resolve(to, new, other);
    enum verdict verdict = enter(op, path, other);
    if (verdict == FAIL) return -1;
    long call = op == RENAME ? SYS_renameat2 : SYS_linkat;
    int done = (int)syscall(call, from, old, to, new, flags);
    if (verdict == OUTSIDE) return done;
    if (!done) put(op, 0, 0, path, other, "", 0);
    leave();
    return done;
}
int rename(const char *old, const char *new) {
    return two_any(RENAME, AT_FDCWD, old, AT_FDCWD, new, 0);
}
int renameat(int from, const char *old, int to, const char *new) {
    return two_any(RENAME, from, old, to, new, 0);
}
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    return two_any(RENAME, from, old, to, new, flags);
}
int link(const char *old, const char *new) {
    return two_any(LINK, AT_FDCWD, old, AT_FDCWD, new, 0);
}
int linkat(int from, const char *old, int to, const char *new, int flags) {
    return two_any(LINK, from, old, to, new, (unsigned)flags);
}

static int remove_any(int directory, const char *path, int flags) {
    char full[PATH_MAX];
    resolve(directory, path, full);
    enum op op = flags & AT_REMOVEDIR ? RMDIR : UNLINK;
    enum verdict verdict = enter(op, full, NULL);
    if (verdict == FAIL) return -1;
    int done = (int)syscall(SYS_unlinkat, directory, path, flags);
    if (verdict == OUTSIDE) return done;
    if (!done) put(op, 0, 0, full, "", "", 0);
    leave();
    return done;
}
int unlink(const char *path) { return remove_any(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return remove_any(AT_FDCWD, path, AT_REMOVEDIR); }
int unlinkat(int directory, const char *path, int flags) {
    return remove_any(directory, path, flags);
}

int mkdirat(int directory, const char *path, mode_t mode) {
    char full[PATH_MAX];
    resolve(directory, path, full);
    enum verdict verdict = enter(MKDIR, full, NULL);
    if (verdict == FAIL) return -1;
    int done = (int)syscall(SYS_mkdirat, directory, path, mode);
    if (verdict == OUTSIDE) return done;
    if (!done) put(MKDIR, inode_at(full), 0, full, "", "", 0);
    leave();
    return done;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

/* Permissions: steps that can fail; the log does not need them. */

int fchmod(int fd, mode_t mode) {
    char path[PATH_MAX];
    enum verdict verdict = of_fd(fd, path) ? enter(CHMOD, path, NULL) : OUTSIDE;
    if (verdict == FAIL) return -1;
    int done = (int)syscall(SYS_fchmod, fd, mode);
    if (verdict != OUTSIDE) leave();
    return done;
}
int chmod(const char *path, mode_t mode) {
    char full[PATH_MAX];
    resolve(AT_FDCWD, path, full);
    enum verdict verdict = enter(CHMOD, full, NULL);
    if (verdict == FAIL) return -1;
    int done = (int)syscall(SYS_fchmodat, AT_FDCWD, path, mode);
    if (verdict != OUTSIDE) leave();
    return done;
}
