#include "segment.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "atomic.h"
#include "limits.h"

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

enum { ASK_ABOVE = 16 << 20 };         /* bytes of a segment from which on it is worth asking whether they are there */

static long page_bytes(void) {
    static long bytes;                 /* racing threads store the same value */
    long known = shm_load(&bytes);
    if (known == 0) shm_store(&bytes, known = sysconf(_SC_PAGESIZE));
    return known;
}

uint64_t shm_pages(uint64_t bytes) {
    const uint64_t mask = (uint64_t)page_bytes() - 1;
    return bytes > UINT64_MAX - mask ? 0 : (bytes + mask) & ~mask;
}

/* fallocate over-commits, and wakes the OOM killer instead of failing. */
static int fits(uint64_t bytes) { return bytes <= ASK_ABOVE || bytes <= shm_memory_room("").left; }

/* Return 0 or the errno.  Signals wait meanwhile, because many kernels undo what an interrupted fallocate has done: one that
 * takes longer than the time between two signals would begin again for ever. */
static int allocate_pages(int fd, uint64_t bytes) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int error = HXA_RETRY(fallocate(fd, 0, 0, (off_t)bytes)) < 0 ? errno : 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

int shm_segment_create(const char *name, uint64_t bytes, int *fd) {
    if (bytes == 0 || bytes > (uint64_t)INT64_MAX || !fits(bytes)) return HXA_REFUSAL(HXA_E_NOMEM, ENOMEM);
    int made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (made < 0 && errno == EINVAL) made = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);      /* before Linux 6.3 */
    if (made < 0) return shm_refusal_of(errno);
    int error = 0;
    if (fchmod(made, 0400) < 0 || HXA_RETRY(ftruncate(made, (off_t)bytes)) < 0) error = errno;
    else error = allocate_pages(made, bytes);
    if (error != 0) {
        close(made);
        return shm_refusal_of(error);
    }
    *fd = made;
    return 0;
}

int shm_segment_seal(int fd, int read_only) {
    const int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL | (read_only ? F_SEAL_FUTURE_WRITE : 0);
    return fcntl(fd, F_ADD_SEALS, seals) < 0 ? shm_refusal_of(errno) : 0;
}

/* The seals come first: of another kind of file (of a hostile FUSE server, say) fcntl answers from the descriptor, where fstat
 * would ask the file system and wait.  Pages that do not exist would be allocated, and charged to us, when we touch them; the
 * owner can still take them away later (see segment.h). */
int shm_segment_check(int fd, uint64_t bytes) {
    const int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & (F_SEAL_SHRINK | F_SEAL_GROW)) != (F_SEAL_SHRINK | F_SEAL_GROW)) return -HXA_E_PROTOCOL;
    struct stat about;
    struct statfs system;
    if (fstat(fd, &about) < 0 || fstatfs(fd, &system) < 0) return -HXA_E_PROTOCOL;
    if (!S_ISREG(about.st_mode) || system.f_type != SHM_TMPFS_MAGIC) return -HXA_E_PROTOCOL;    /* huge pages can run out */
    if (about.st_size <= 0 || (uint64_t)about.st_size < bytes) return -HXA_E_PROTOCOL;
    if ((uint64_t)about.st_blocks * 512 < shm_pages(bytes)) return -HXA_E_PROTOCOL;
    return 0;
}

int shm_segment_map(int fd, uint64_t bytes, uint8_t **base) {
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) return shm_refusal_of(errno);
    *base = (uint8_t *)at;
    return 0;
}

/* With a guard page behind, which also keeps mappings of equal size from lying at equal distances: where source and target
 * differ in address bits above 27 only, AMD's way predictor takes one for the other, and copies within the first-level cache
 * take half as long again. */
int shm_segment_map_peer(int fd, uint64_t bytes, int writable, uint8_t **base) {
    const uint64_t guard = (uint64_t)page_bytes();
    if (bytes + guard < bytes) return HXA_REFUSAL(HXA_E_NOMEM, ENOMEM);
    uint8_t *at = (uint8_t *)mmap(NULL, bytes + guard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return shm_refusal_of(errno);
    if (mmap(at, bytes, PROT_READ | (writable ? PROT_WRITE : 0), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int status = shm_refusal_of(errno);
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

int shm_segment_reader(int fd, int *reader) {
    char path[40];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    const int made = HXA_RETRY(open(path, O_RDONLY | O_CLOEXEC));
    if (made < 0) return shm_refusal_of(errno);
    *reader = made;
    return 0;
}
