#include "engine.hpp"

#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "acl.hpp"

namespace sim {
namespace {

using hixl::FAILED;
using hixl::PARAM_INVALID;
using hixl::SUCCESS;
using hixl::TIMEOUT;

// A peer reads this to find out if it can.
uint64_t landmark = 0;

std::atomic<uint64_t> next_link{1};

}  // namespace

Borrowed::Borrowed(void *context) : switched_(context != nullptr) {
    if (!switched_) {
        return;
    }
    if (aclrtGetCurrentContext(&before_) != acl::OK) {
        before_ = nullptr;
    }
    if (settings().strict && before_ != nullptr && hixlsim_context_lives(before_) == 0) {
        die("this thread's device context belongs to an engine that is over; set the thread's own before it calls HIXL");
    }
    aclrtSetCurrentContext(context);
}

Borrowed::~Borrowed() {
    if (switched_ && before_ != nullptr) {
        aclrtSetCurrentContext(before_);
    }
}

bool Slots::take() {
    uint64_t used = used_.load();
    do {
        if (used >= limit_) {
            return false;
        }
    } while (!used_.compare_exchange_weak(used, used + 1));
    return true;
}

void Slots::give() { used_.fetch_sub(1); }

Status Engine::initialize(Options options) {
    options_ = std::move(options);
    Status status = options_.check(backend_);
    if (status != SUCCESS) {
        return status;
    }
    std::string ip;
    int port = 0;
    status = parse_engine(id_, ip, port);
    if (status != SUCCESS) {
        return status;
    }
    uint32_t devices = 0;
    aclrtGetDeviceCount(&devices);
    if (backend_ != Backend::cs || devices != 0) {  // CS over host NICs needs none
        const int error = aclrtGetDevice(&device_);
        if (error != acl::OK) {
            log("no device is set on the thread of Initialize");
            return static_cast<Status>(error);
        }
        void *before = nullptr;
        aclrtGetCurrentContext(&before);
        aclrtCreateContext(&context_, device_);
        aclrtSetCurrentContext(before);
    }
    // Lets peers that are not children reach into this process where Yama would allow only parents.
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    signal(SIGPIPE, SIG_IGN);  // so does the real one, for the whole process
    landmark = reinterpret_cast<uint64_t>(&landmark);
    status = begin();
    post_ = std::make_unique<Post>([this](const ConnectionPtr &c, Frame &f) { return on_frame(c, f); },
                                   [this](const ConnectionPtr &c) { on_end(c); });
    if (status != SUCCESS || !post_->start(ip, port)) {
        end();
        if (context_ != nullptr) {
            aclrtDestroyContext(context_);
        }
        return status != SUCCESS ? status : FAILED;
    }
    schedule_beat();
    initialized_ = true;
    return SUCCESS;
}

void Engine::finalize() {
    initialized_ = false;
    end();
    tell_gone(0, 0.3);
    post_->stop();
    worker_.stop();
    {
        std::lock_guard<std::mutex> hold(halves_guard_);
        halves_.clear();
    }
    add(Count::regions, -static_cast<int64_t>(memory_.size()));
    for (auto &each : memory_) {
        each.second->lives = false;
    }
    memory_.clear();
    if (context_ != nullptr) {
        aclrtDestroyContext(context_);
        context_ = nullptr;
    }
}

void Engine::schedule_beat() {
    post_->later(after(settings().heartbeat_ms / 1000.0), [this] {
        beat();
        schedule_beat();
    });
}

Status Engine::check_overlap(const Region &region, hixl::MemHandle &same) const {
    for (const auto &each : memory_) {
        const Region &other = *each.second;
        if (other.type != region.type || region.addr + region.len <= other.addr || other.addr + other.len <= region.addr) {
            continue;
        }
        if (other.addr != region.addr || other.len != region.len) {
            return PARAM_INVALID;
        }
        same = each.first;
    }
    return SUCCESS;
}

Status Engine::register_mem(const hixl::MemDesc &mem, hixl::MemType type, hixl::MemHandle &handle) {
    if (mem.addr > UINTPTR_MAX - mem.len) {
        return PARAM_INVALID;
    }
    stall(Point::register_stall);
    const Status injected = failure(Point::register_);
    if (injected != SUCCESS) {
        return injected;
    }
    const auto region = std::make_shared<Region>(mem.addr, mem.len, type, next_region_++);
    hixl::MemHandle same = nullptr;
    std::lock_guard<std::mutex> hold(memory_guard_);
    const Status status = admit(*region, same);
    if (status != SUCCESS) {
        return status;
    }
    handle = same != nullptr ? same : region.get();
    if (same == nullptr) {
        memory_[handle] = region;
        add(Count::regions);
    }
    return SUCCESS;
}

Status Engine::deregister_mem(hixl::MemHandle handle) {
    RegionPtr region;
    {
        std::lock_guard<std::mutex> hold(memory_guard_);
        const auto found = memory_.find(handle);
        if (found == memory_.end()) {
            return SUCCESS;
        }
        region = found->second;
        region->lives = false;
        memory_.erase(found);
    }
    add(Count::regions, -1);
    std::vector<std::shared_ptr<Stream>> streams;
    {
        std::lock_guard<std::mutex> hold(wires_guard_);
        for (const auto &each : wires_) {
            streams.push_back(each.second.lock());
        }
    }
    for (const auto &stream : streams) {
        if (stream != nullptr) {
            stream->fence();
        }
    }
    tell_gone(region->id, 1);
    return SUCCESS;
}

Regions Engine::snapshot() {
    Regions regions;
    std::lock_guard<std::mutex> hold(memory_guard_);
    for (const auto &each : memory_) {
        regions.add(each.second);
    }
    return regions;
}

void Engine::tell_gone(uint64_t region, double patience) {
    std::vector<std::pair<uint64_t, ConnectionPtr>> wires;
    {
        std::lock_guard<std::mutex> hold(halves_guard_);
        for (const auto &each : halves_) {
            if (each.second.wire != nullptr) {
                wires.emplace_back(each.first, each.second.wire);
            }
        }
    }
    const auto deadline = after(patience);
    std::unique_lock<std::mutex> hold(gone_guard_);
    for (const auto &each : wires) {
        gone_.insert({each.first, region});
        if (each.second->send(region == 0 ? Message::bye : Message::gone, Pack().number(region).text(), deadline) != 0) {
            gone_.erase({each.first, region});
        }
    }
    const auto known = [&] {
        return std::none_of(wires.begin(), wires.end(), [&](const auto &each) { return gone_.count({each.first, region}) != 0; });
    };
    gone_bell_.wait_until(hold, deadline, known);
}

Status Engine::join(const std::string &remote, int timeout_ms, Breaks breaks, bool same_device_is_fine, Joint &joint) {
    const auto deadline = after(timeout_ms / 1000.0);
    std::string ip;
    int port = 0;
    Status status = parse_engine(remote, ip, port);
    const Regions locals = snapshot();
    if (status == SUCCESS) {
        status = dial(ip, port, deadline, joint.control);
    }
    if (status != SUCCESS) {
        return status;
    }
    const auto late = [deadline] { return Clock::now() >= deadline ? TIMEOUT : FAILED; };
    Pack hello;
    hello.number(static_cast<uint64_t>(backend_)).string(id_).number(static_cast<uint64_t>(device_));
    Frame frame{};
    if (joint.control->send(Message::hello, hello.text(), deadline) != 0 ||
        joint.control->wait(frame, answer_by(deadline)) != Took::frame || frame.type != Message::welcome) {
        return late();
    }
    Unpack welcome(frame.body);
    status = static_cast<Status>(welcome.number());
    if (status != SUCCESS) {
        return status;
    }
    joint.remote = remote;
    joint.number = welcome.number();
    joint.device = welcome.number();
    const auto pid = static_cast<pid_t>(welcome.number());
    const uint64_t word = welcome.number();
    const std::string endpoints = welcome.string();
    if (!options_.meets(endpoints)) {
        return PARAM_INVALID;
    }
    if (!same_device_is_fine && settings().refuse_same_device && joint.device == static_cast<uint64_t>(device_)) {
        return PARAM_INVALID;
    }
    auto other = std::make_unique<Remote>(pid, ip, port);
    other->probe(word, word);
    joint.stream = std::make_shared<Stream>(breaks, std::move(other));
    for (uint64_t count = welcome.number(); count != 0 && welcome.good(); --count) {
        const uintptr_t addr = welcome.number();
        const size_t len = welcome.number();
        const auto type = static_cast<hixl::MemType>(welcome.number());
        joint.stream->remote_regions.add(std::make_shared<Region>(addr, len, type, welcome.number()));
    }
    joint.stream->local_regions = locals;
    if (dial(ip, port, deadline, joint.wire) != SUCCESS ||
        joint.wire->send(Message::wire, Pack().number(joint.number).text(), deadline) != 0 ||
        joint.wire->wait(frame, deadline) != Took::frame || frame.type != Message::joined) {
        return late();
    }
    // What was deregistered between the two connections.
    std::set<uint64_t> live;
    Unpack ids(frame.body);
    for (uint64_t count = ids.number(); count != 0 && ids.good(); --count) {
        live.insert(ids.number());
    }
    for (const RegionPtr &each : joint.stream->remote_regions.all()) {
        each->lives = live.count(each->id) != 0;
    }
    {
        std::lock_guard<std::mutex> hold(wires_guard_);
        joint.wire->link = next_link++;
        wires_[joint.wire->link] = joint.stream;
    }
    post_->watch(joint.wire);
    add(Count::links);
    return SUCCESS;
}

// COMM reads an answer without a time limit: a peer that does not answer blocks it for ever.
Clock::time_point Engine::answer_by(Clock::time_point deadline) const {
    const int most = settings().comm_patience_ms;
    if (backend_ != Backend::comm) {
        return deadline;
    }
    return most == 0 ? Clock::time_point::max() : std::max(deadline, after(most / 1000.0));
}

void Engine::part(Joint &joint) {
    joint.stream->abort();
    {
        std::lock_guard<std::mutex> hold(wires_guard_);
        wires_.erase(joint.wire->link);
    }
    post_->forget(joint.wire);
    post_->forget(joint.control);
    joint.wire->shut();
    joint.control->shut();
    add(Count::links, -1);
}

RequestPtr Engine::make(const std::shared_ptr<Stream> &stream, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops) {
    const auto request = std::make_shared<Request>();
    request->op = op;
    request->ops = ops;
    request->stream = stream;
    request->era = stream->era();
    request->breaks = faulty(Point::transfer);
    request->hangs = faulty(Point::hang);
    add(Count::submitted);
    return request;
}

bool Engine::wait(Request &request, Clock::time_point deadline) {
    while (request.stream->state_of(request) == State::waiting && !request.stream->broken_loudly()) {
        if (Clock::now() >= deadline) {
            return false;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
    return true;
}

Status Engine::status_of_all(uint32_t, bool, std::vector<hixl::TransferResult> &) { return hixl::UNSUPPORTED; }

bool Engine::on_frame(const ConnectionPtr &from, Frame &frame) {
    switch (frame.type) {
        case Message::hello:
            return on_hello(from, frame);
        case Message::wire:
        case Message::gone:
        case Message::bye:
        case Message::gone_ack:
            return on_wire(from, frame);
        case Message::put:
        case Message::get:
            return on_bytes(from, frame);
        default:
            break;
    }
    Half *half = nullptr;
    std::lock_guard<std::mutex> hold(halves_guard_);
    if (!from->client.empty()) {
        const auto found = halves_.find(from->link);
        half = found == halves_.end() ? nullptr : &found->second;
        if (half != nullptr) {
            half->heard = Clock::now();
        }
    }
    return heard(from, half, frame);
}

bool Engine::on_hello(const ConnectionPtr &from, Frame &frame) {
    Unpack hello(frame.body);
    const auto backend = static_cast<Backend>(hello.number());
    const std::string client = hello.string();
    Pack welcome;
    if (backend != backend_ || client.empty()) {
        // The two protocols are not compatible.
        from->send(Message::welcome, welcome.number(FAILED).text(), after(1));
        return true;
    }
    std::lock_guard<std::mutex> hold(halves_guard_);
    replace(client);
    from->link = next_link++;
    from->client = client;
    Half &half = halves_[from->link];
    half.client = client;
    half.control = from;
    const Regions regions = snapshot();
    welcome.number(SUCCESS).number(from->link).number(static_cast<uint64_t>(device_)).number(static_cast<uint64_t>(getpid()));
    welcome.number(reinterpret_cast<uint64_t>(&landmark)).string(options_.endpoint_names()).number(regions.all().size());
    for (const RegionPtr &region : regions.all()) {
        welcome.number(region->addr).number(region->len).number(region->type).number(region->id);
    }
    from->send(Message::welcome, welcome.text(), after(5));
    return true;
}

bool Engine::on_wire(const ConnectionPtr &from, Frame &frame) {
    Unpack body(frame.body);
    const uint64_t number = body.number();
    if (frame.type == Message::wire) {
        std::lock_guard<std::mutex> hold(halves_guard_);
        const auto half = halves_.find(number);
        if (half == halves_.end()) {
            return false;
        }
        half->second.wire = from;
        from->link = number;
        const Regions regions = snapshot();
        Pack ids;
        ids.number(regions.all().size());
        for (const RegionPtr &region : regions.all()) {
            ids.number(region->id);
        }
        from->send(Message::joined, ids.text(), after(5));
        return true;
    }
    if (frame.type == Message::gone_ack) {
        std::lock_guard<std::mutex> hold(gone_guard_);
        gone_.erase({from->link, number});
        gone_bell_.notify_all();
        return true;
    }
    std::shared_ptr<Stream> stream;
    {
        std::lock_guard<std::mutex> hold(wires_guard_);
        const auto found = wires_.find(from->link);
        stream = found == wires_.end() ? nullptr : found->second.lock();
    }
    if (stream != nullptr) {
        frame.type == Message::bye ? stream->lose(true) : stream->bury(number);
    }
    from->send(Message::gone_ack, frame.body, after(1));
    return true;
}

bool Engine::on_bytes(const ConnectionPtr &from, Frame &frame) {
    Unpack body(frame.body);
    const uintptr_t at = body.number();
    const std::string bytes = frame.type == Message::put ? body.string() : std::string();
    const size_t size = frame.type == Message::put ? bytes.size() : body.number();
    if (!body.good() || !snapshot().covers(at, size)) {
        from->send(Message::ack, "", after(1));
        return true;
    }
    if (frame.type == Message::put) {
        std::memcpy(reinterpret_cast<void *>(at), bytes.data(), size);
        return from->send(Message::got, "", after(5)) == 0;
    }
    return from->send(Message::got, std::string(reinterpret_cast<const char *>(at), size), after(5)) == 0;
}

void Engine::on_end(const ConnectionPtr &from) {
    {
        std::lock_guard<std::mutex> hold(wires_guard_);
        const auto found = from->client.empty() ? wires_.find(from->link) : wires_.end();
        if (found != wires_.end()) {
            const auto stream = found->second.lock();
            if (stream != nullptr) {
                stream->lose(false);
            }
            return;
        }
    }
    {
        std::lock_guard<std::mutex> hold(gone_guard_);
        for (auto each = gone_.begin(); each != gone_.end();) {
            each = each->first == from->link ? gone_.erase(each) : std::next(each);
        }
        gone_bell_.notify_all();
    }
    parted(from);
    std::lock_guard<std::mutex> hold(halves_guard_);
    const auto half = halves_.find(from->link);
    if (half == halves_.end()) {
        return;
    }
    if (half->second.wire == from) {
        half->second.wire = nullptr;
    }
    if (half->second.control == from && backend_ != Backend::comm) {
        halves_.erase(half);
    }
}

}  // namespace sim
