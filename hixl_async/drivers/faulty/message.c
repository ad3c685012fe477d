#include "message.h"

#include "link.h"

void faulty_message_send(hxa_link *link, const faulty_message *message) {
    hxa_instance *self = link->self;
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_MESSAGE, .data = message->data, .data_len = message->len};
    self->outer.event(self->outer.ctx, &event);
}

/* Where the wrapped driver takes no messages they become notifications, and an empty one is a violation of the protocol. */
int faulty_message_receive(hxa_link *link, const void *data, size_t len) {
    static const char topic[] = "faulty.said";
    hxa_instance *self = link->self;
    if (self->table->message != NULL) return self->table->message(link->inner, data, len);
    if (len == 0) return -HXA_E_PROTOCOL;
    const hxa_event event = {
        .link = link->cookie, .kind = HXA_EVENT_NOTE, .topic = topic, .topic_len = sizeof topic - 1, .data = data,
        .data_len = (uint32_t)len};
    self->outer.event(self->outer.ctx, &event);
    return 0;
}
