# The declarations of include/hxa_driver.h, which explains them.
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t


cdef extern from "hxa_driver.h" nogil:
    const char *HXA_DRIVER_CAPSULE
    int HXA_DRIVER_ABI
    size_t HXA_DRIVER_MIN_SIZE
    enum:
        HXA_DONE
        HXA_PENDING
    enum:
        HXA_OK
        HXA_E_INVALID
        HXA_E_RANGE
        HXA_E_RIGHTS
        HXA_E_UNSUPPORTED
        HXA_E_NOMEM
        HXA_E_BUSY
        HXA_E_LINK
        HXA_E_CANCELLED
        HXA_E_TIMEOUT
        HXA_E_PROTOCOL
        HXA_E_SYSTEM
    enum:
        HXA_COMPLETED
        HXA_RELEASED
        HXA_SCOPE_OP
        HXA_SCOPE_LINK
        HXA_READ
        HXA_WRITE
        HXA_RIGHT_READ
        HXA_RIGHT_WRITE
        HXA_KIND_HOST
        HXA_KIND_DEVICE
        HXA_PRIORITY_LOW
        HXA_PRIORITY_NORMAL
        HXA_PRIORITY_HIGH
        HXA_CAP_LOCAL_ANY
        HXA_CAP_ALLOC
        HXA_CAP_REGISTER
        HXA_CAP_SAME_HOST
        HXA_CAP_SIGNAL
        HXA_CAP_NOTIFY
        HXA_CAP_CANCEL
        HXA_CAP_FDS
        HXA_METADATA_BYTES
        HXA_METADATA_FDS
        HXA_MESSAGE_BYTES
        HXA_EVENT_NOTE
        HXA_EVENT_SIGNAL
        HXA_EVENT_LINK_DOWN
        HXA_EVENT_LOG
        HXA_EVENT_MESSAGE

    int32_t hxa_refusal_status(int answer)
    int32_t hxa_refusal_native(int answer)

    ctypedef struct hxa_instance:
        pass
    ctypedef struct hxa_link:
        pass
    ctypedef struct hxa_mem:
        pass

    ctypedef struct hxa_op:
        hxa_op *next
        uint32_t events
        int32_t status
        int32_t native
        uint32_t scope
        int64_t failed
        uint64_t bytes
        void *owner

    ctypedef struct hxa_desc:
        hxa_mem *lmem
        uint64_t loff
        hxa_mem *rmem
        uint64_t roff
        uint64_t len

    ctypedef struct hxa_batch:
        uint32_t verb
        int32_t priority
        size_t n
        const hxa_desc *desc
        uint64_t bytes
        hxa_mem *signal
        uint64_t signal_off
        uint64_t signal_value
        const void *topic
        uint32_t topic_len
        uint32_t note_len
        const void *note

    ctypedef struct hxa_metadata:
        uint32_t len
        uint32_t nfds
        int *fds
        uint8_t *data

    ctypedef struct hxa_option:
        const char *key
        const char *value

    ctypedef struct hxa_limits:
        uint64_t descriptors
        uint64_t note_bytes
        uint64_t inline_bytes
        uint64_t alignment
        uint64_t caps

    ctypedef struct hxa_stats:
        uint64_t ops_inline
        uint64_t ops_queued
        uint64_t bytes_read
        uint64_t bytes_written
        uint64_t notes_sent
        uint64_t notes_received
        uint64_t signals_sent
        uint64_t wakes_sent
        uint64_t wakes_received
        uint64_t links
        uint64_t memories
        uint64_t threads

    ctypedef struct hxa_event:
        uint64_t link
        uint32_t kind
        int32_t status
        const void *topic
        const void *data
        uint32_t topic_len
        uint32_t data_len

    ctypedef struct hxa_sink:
        void *ctx
        void (*post)(void *ctx, hxa_op *op, uint32_t events) noexcept nogil
        void (*event)(void *ctx, const hxa_event *event) noexcept nogil

    ctypedef struct hxa_driver:
        uint32_t abi
        uint32_t size
        const char *name
        uint64_t caps
        int (*open)(const hxa_option *options, size_t n, const hxa_sink *sink, hxa_instance **self,
                    char *error, size_t error_len) noexcept nogil
        void (*close)(hxa_instance *self) noexcept nogil
        void (*after_fork)(hxa_instance *self) noexcept nogil
        void (*limits)(hxa_instance *self, hxa_limits *out) noexcept nogil
        void (*stats)(hxa_instance *self, hxa_stats *out) noexcept nogil
        const char *(*error_text)(int32_t status, int32_t native) noexcept nogil
        int (*mem_alloc)(hxa_instance *self, uint64_t size, uint32_t rights, hxa_mem **mem,
                         void **address) noexcept nogil
        int (*mem_register)(hxa_instance *self, void *address, uint64_t size, uint32_t kind, uint32_t rights,
                            hxa_mem **mem) noexcept nogil
        int (*mem_export)(hxa_mem *mem, uint32_t rights, hxa_metadata *metadata) noexcept nogil
        int (*mem_import)(hxa_link *link, const hxa_metadata *metadata, uint64_t size, uint32_t rights, hxa_mem **mem,
                          hxa_op *op) noexcept nogil
        void (*mem_release)(hxa_mem *mem) noexcept nogil
        int (*link_new)(hxa_instance *self, uint64_t cookie, hxa_link **link, hxa_metadata *metadata) noexcept nogil
        int (*link_connect)(hxa_link *link, const hxa_metadata *metadata, hxa_op *op) noexcept nogil
        int (*link_fd)(hxa_link *link) noexcept nogil
        int (*link_stop)(hxa_link *link, int dead, hxa_op *op) noexcept nogil
        int (*link_fence)(hxa_link *link, hxa_op *op) noexcept nogil
        void (*link_free)(hxa_link *link) noexcept nogil
        int (*submit)(hxa_link *link, const hxa_batch *batch, hxa_op *op) noexcept nogil
        int (*cancel)(hxa_link *link, hxa_op *op) noexcept nogil
        uint64_t (*progress)(hxa_link *link, const hxa_op *op) noexcept nogil
        int (*poll)(hxa_link *link, uint32_t budget) noexcept nogil
        int (*start)(hxa_instance *self, hxa_op *op) noexcept nogil
        int (*shutdown)(hxa_instance *self, hxa_op *op) noexcept nogil
        int (*mem_ready)(hxa_mem *mem, hxa_op *op) noexcept nogil
        int (*mem_retire)(hxa_mem *mem, hxa_op *op) noexcept nogil
        int (*message)(hxa_link *link, const void *data, size_t len) noexcept nogil
        int (*abandon)(hxa_link *link, hxa_op *op) noexcept nogil
        int (*link_pace)(hxa_link *link, uint64_t bytes_per_second) noexcept nogil
        const char *(*about)(hxa_instance *self) noexcept nogil
        int (*mem_borrow)(hxa_link *link, hxa_mem *mem, void **address) noexcept nogil
        void (*mem_return)(hxa_link *link, hxa_mem *mem) noexcept nogil
        int (*waits)(hxa_link *link, const hxa_op *op) noexcept nogil
