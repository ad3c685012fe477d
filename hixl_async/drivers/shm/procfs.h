/* Small files of the kernel: /proc and /sys. */
#ifndef SHM_PROCFS_H
#define SHM_PROCFS_H

#include "base.h"

/* Read a whole file as text, as far as there is space.  Return 1, or 0 with *error set to the errno. */
SHM_INTERNAL int shm_file_read(const char *path, char *text, size_t size, int *error);

/* Find the line that begins with `key` (such as "MemFree:") and return what follows it, or NULL. */
SHM_INTERNAL const char *shm_line_find(const char *text, const char *key);

#endif /* SHM_PROCFS_H */
