/* Segments: memory without a name that travels as a descriptor.
 *
 * Ours are memfds, allocated up front (so that a full machine is an error here and not a SIGBUS later), sealed against
 * changes of size, and of mode 0400, so that a reader can't reopen its descriptor for writing.  A peer's are believed only
 * after a look at what the kernel says about them.
 */
#include "shm.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008u
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#define MADV_POPULATE_WRITE 23
#endif
#define SHM_TMPFS_MAGIC 0x01021994

enum { ASK_ABOVE = 16 << 20 };         /* bytes of a segment from which on it is worth asking whether the machine has them */

static long page_bytes(void) {
    static long bytes;                 /* racing threads store the same value */
    long known = shm_load(&bytes);
    if (known == 0) shm_store(&bytes, known = sysconf(_SC_PAGESIZE));
    return known;
}

/* Rounded up to whole pages; 0 if that overflows. */
uint64_t shm_pages(uint64_t bytes) {
    const uint64_t mask = (uint64_t)page_bytes() - 1;
    return bytes > UINT64_MAX - mask ? 0 : (bytes + mask) & ~mask;
}

static int status_of(int error) {
    switch (error) {
    case ENOMEM: case ENOSPC: case EMFILE: case ENFILE: case EFBIG: case EDQUOT: return -HXA_E_NOMEM;
    case EPERM: case EACCES: return -HXA_E_RIGHTS;
    default: return -HXA_E_SYSTEM;
    }
}

/* The number after `key` in a file of the kernel's, in bytes; UINT64_MAX if there is none ("max", or no such file). */
static uint64_t kernel_number(const char *path, const char *key, uint64_t unit) {
    char text[2048];
    const int fd = HXA_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (fd < 0) return UINT64_MAX;
    const ssize_t got = HXA_RETRY(read(fd, text, sizeof text - 1));
    close(fd);
    if (got <= 0) return UINT64_MAX;
    text[got] = '\0';
    const char *at = strstr(text, key);
    unsigned long long value;
    return at != NULL && sscanf(at + strlen(key), "%llu", &value) == 1 ? (uint64_t)value * unit : UINT64_MAX;
}

/* fallocate does not say no to more than the machine has: it takes until somebody is killed for it. */
static int fits(uint64_t bytes) {
    const uint64_t free = kernel_number("/proc/meminfo", "MemAvailable:", 1024);
    const uint64_t swap = kernel_number("/proc/meminfo", "SwapFree:", 1024);
    if (free != UINT64_MAX && bytes > free + (swap != UINT64_MAX ? swap : 0)) return 0;
    return bytes <= kernel_number("/sys/fs/cgroup/memory.max", "", 1);
}

/* Answers 0 or errno.  Signals wait meanwhile: many kernels undo all that an interrupted fallocate has done, so that one which
 * takes longer than the time between two signals would begin again for ever. */
static int allocate_pages(int fd, uint64_t bytes) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = HXA_RETRY(fallocate(fd, 0, 0, (off_t)bytes)) < 0 ? errno : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

/* A memfd of whole pages, not sealed yet.  Answers 0 or a negative hxa_status. */
int shm_segment_create(const char *name, uint64_t bytes, int *fd) {
    if (bytes == 0 || bytes > (uint64_t)INT64_MAX || (bytes > ASK_ABOVE && !fits(bytes))) return -HXA_E_NOMEM;
    int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (made < 0 && errno == EINVAL) made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);      /* before Linux 6.3 */
    if (made < 0) return status_of(errno);
    int error = 0;
    if (fchmod(made, 0400) < 0 || HXA_RETRY(ftruncate(made, (off_t)bytes)) < 0) error = errno;
    else error = allocate_pages(made, bytes);
    if (error != 0) {
        const int status = status_of(error);
        close(made);
        return status;
    }
    *fd = made;
    return 0;
}

/* Fixes the size for ever; read_only (after our own mapping exists) also forbids any new way of writing. */
int shm_segment_seal(int fd, int read_only) {
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0);
    return fcntl(fd, F_ADD_SEALS, seals) < 0 ? status_of(errno) : 0;
}

/* Is a peer's descriptor a segment of at least `bytes` that can neither vanish under our feet (SIGBUS) nor make us allocate
 * its pages?  The seals come first: of another kind of file (a hostile FUSE server's, say) fcntl answers from the descriptor,
 * where fstat would ask the file system and wait. */
int shm_segment_check(int fd, uint64_t bytes, uint64_t *actual) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) return -HXA_E_PROTOCOL;
    struct stat about;
    struct statfs system;
    if (fstat(fd, &about) < 0 || fstatfs(fd, &system) < 0) return -HXA_E_PROTOCOL;
    if (!S_ISREG(about.st_mode) || system.f_type != SHM_TMPFS_MAGIC) return -HXA_E_PROTOCOL;    /* huge pages can run out */
    if (about.st_size <= 0 || (uint64_t)about.st_size < bytes) return -HXA_E_PROTOCOL;
    if ((uint64_t)about.st_blocks * 512 < shm_pages(bytes)) return -HXA_E_PROTOCOL;
    *actual = (uint64_t)about.st_size;
    return 0;
}

/* Our own memory, which children keep.  Answers 0 or a negative hxa_status. */
int shm_segment_map(int fd, uint64_t bytes, uint8_t **base) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return status_of(errno);
    *base = (uint8_t *)at;
    return 0;
}

/* Memory that is shared with a peer, which children do not keep, with a guard page behind.  The guard also keeps mappings of
 * equal size from lying at equal distances: where source and target differ in address bits above 27 only, AMD's way predictor
 * takes one for the other, and copies within the first-level cache take half as long again. */
int shm_segment_map_peer(int fd, uint64_t bytes, int writable, uint8_t **base) {
    const uint64_t guard = (uint64_t)page_bytes();
    if (bytes + guard < bytes) return -HXA_E_NOMEM;
    uint8_t *at = (uint8_t *)mmap(NULL, bytes + guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return status_of(errno);
    if (mmap(at, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int status = status_of(errno);
        munmap(at, bytes + guard);
        return status;
    }
    madvise(at, bytes + guard, MADV_DONTFORK);
    *base = at;
    return 0;
}

void shm_segment_unmap(uint8_t *base, uint64_t bytes) {
    if (bytes != 0) munmap(base, bytes);
}

void shm_segment_unmap_peer(uint8_t *base, uint64_t bytes) {
    if (bytes != 0) munmap(base, bytes + (uint64_t)page_bytes());
}

/* Takes the page faults of a mapping now.  Answers 0 or errno.  Never changes a byte: a write fault stores nothing. */
int shm_segment_populate(uint8_t *base, uint64_t bytes, int writable) {
    int failed;
    do failed = HXA_RETRY(madvise(base, bytes, writable ? MADV_POPULATE_WRITE : MADV_POPULATE_READ)) < 0;
    while (failed && errno == EAGAIN);
    if (!failed) return 0;
    if (errno != EINVAL) return errno;
    /* Before Linux 5.14. */
    for (uint64_t at = 0; at < bytes; at += (uint64_t)page_bytes()) (void)*(volatile uint8_t *)(base + at);
    return 0;
}

/* A descriptor of the same segment that can only read: reopened, because dup would share the right to write. */
int shm_segment_reader(int fd, int *reader) {
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int made = HXA_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (made < 0) return status_of(errno);
    *reader = made;
    return 0;
}

static void *close_slowly(void *fd) {
    close((int)(intptr_t)fd);
    return NULL;
}

/* Closes a descriptor that a peer gave us.  Closing asks the file behind it (FUSE's flush, a lingering socket), and a hostile
 * one may not answer: only kinds that can't wait are closed here, others by a thread that nobody waits for. */
void shm_close_foreign(int fd) {
    if (fd < 0) return;
    if (fcntl(fd, F_GET_SEALS) >= 0 || fcntl(fd, F_GETPIPE_SZ) >= 0) {
        close(fd);
        return;
    }
    pthread_attr_t detached;
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&detached);
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    if (pthread_create(&thread, &detached, close_slowly, (void *)(intptr_t)fd) != 0) close(fd);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&detached);
}

void shm_close_card(const hxa_card *card) {
    for (uint32_t i = 0; i < card->nfds && i < HXA_CARD_FDS; i++) shm_close_foreign(card->fds[i]);
}
