// What the three back-ends share: an engine's life, its memory, how two engines find each other, and the halves of links that
// others made to it.
#pragma once

#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>

#include "memory.hpp"
#include "options.hpp"
#include "settings.hpp"
#include "stream.hpp"
#include "wire.hpp"

namespace sim {

using hixl::Status;

// The engine's own device context is current inside a call, and the caller's again afterwards; but a thread that had none is
// left with the engine's, as in the real library.
class Borrowed {
  public:
    explicit Borrowed(void *context);
    ~Borrowed();

  private:
    void *before_ = nullptr;
    const bool switched_;
};

// Streams of a device, or of an engine: a link with requests in flight holds one.
class Slots {
  public:
    explicit Slots(uint64_t limit) : limit_(limit) {}
    bool take();
    void give();
    uint64_t limit() const { return limit_; }

  private:
    const uint64_t limit_;
    std::atomic<uint64_t> used_{0};
};

struct Pending {
    std::string name;
    std::string text;
};

// What is left with the server of a link: its sockets, and for COMM the notifications that came over it.
struct Half {
    std::string client;
    ConnectionPtr control;
    ConnectionPtr wire;
    std::vector<Pending> notifies;
    Clock::time_point heard = Clock::now();
};

// What a connection to another engine is made of; each back-end keeps it in a link of its own kind.
struct Joint {
    std::string remote;
    uint64_t number = 0;
    uint64_t device = 0;
    ConnectionPtr control;
    ConnectionPtr wire;
    std::shared_ptr<Stream> stream;
};

class Engine {
  public:
    Engine(Backend backend, std::string id) : backend_(backend), id_(std::move(id)) {}
    virtual ~Engine() = default;

    Status initialize(Options options);
    void finalize();
    bool initialized() const { return initialized_; }
    const Options &options() const { return options_; }

    Status register_mem(const hixl::MemDesc &mem, hixl::MemType type, hixl::MemHandle &handle);
    virtual Status deregister_mem(hixl::MemHandle handle);
    virtual Status connect(const std::string &remote, int timeout_ms) = 0;
    virtual Status disconnect(const std::string &remote, int timeout_ms) = 0;
    virtual Status transfer_sync(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                                 int timeout_ms) = 0;
    virtual Status transfer_async(const std::string &remote, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops,
                                  const void *user_data, hixl::TransferReq &req) = 0;
    virtual Status status_of(hixl::TransferReq req, hixl::TransferStatus &status) = 0;
    virtual Status status_of_all(uint32_t most, bool skip_waiting, std::vector<hixl::TransferResult> &results);
    virtual Status send_notify(const std::string &remote, const Pending &notify, int timeout_ms) = 0;
    virtual Status get_notifies(std::vector<hixl::NotifyDesc> &notifies) = 0;
    // As if the hardware of the link had failed now; every link where `remote` is empty.
    virtual void break_link(const std::string &remote) = 0;

  protected:
    virtual Status begin() { return hixl::SUCCESS; }
    virtual void end() = 0;
    // Something that came over a link's control connection; false: reads it no longer.
    virtual bool heard(const ConnectionPtr &from, Half *half, Frame &frame) = 0;
    // The control connection of a client's link ended.
    virtual void parted(const ConnectionPtr &) {}
    virtual void beat() {}
    virtual void replace(const std::string &) {}
    // May this range be registered? `same` is the handle of the very same one, if there is. Under memory_guard_.
    virtual Status admit(const Region &region, hixl::MemHandle &same) = 0;

    Status join(const std::string &remote, int timeout_ms, Breaks breaks, bool same_device_is_fine, Joint &joint);
    void part(Joint &joint);
    Clock::time_point answer_by(Clock::time_point deadline) const;
    Regions snapshot();
    RequestPtr make(const std::shared_ptr<Stream> &stream, hixl::TransferOp op, const std::vector<hixl::TransferOpDesc> &ops);
    // Stays until the request is through; false when time ran out or it never will be.
    static bool wait(Request &request, Clock::time_point deadline);
    // CS and FAB: ranges of one kind do not overlap.
    Status check_overlap(const Region &region, hixl::MemHandle &same) const;

    const Backend backend_;
    const std::string id_;
    Options options_;
    void *context_ = nullptr;
    int32_t device_ = -1;
    std::unique_ptr<Post> post_;
    Worker worker_;
    std::mutex memory_guard_;
    std::map<hixl::MemHandle, RegionPtr> memory_;
    std::mutex halves_guard_;
    std::map<uint64_t, Half> halves_;

  private:
    bool on_frame(const ConnectionPtr &from, Frame &frame);
    void on_end(const ConnectionPtr &from);
    bool on_hello(const ConnectionPtr &from, Frame &frame);
    bool on_wire(const ConnectionPtr &from, Frame &frame);
    bool on_bytes(const ConnectionPtr &from, Frame &frame);
    void schedule_beat();
    // Tells every client that a region is no more (0: all of them), and waits until they know.
    void tell_gone(uint64_t region, double patience);

    std::atomic<bool> initialized_{false};
    std::atomic<uint64_t> next_region_{1};
    std::mutex wires_guard_;
    std::map<uint64_t, std::weak_ptr<Stream>> wires_;  // our links, by the descriptor of their wire
    std::mutex gone_guard_;
    std::condition_variable gone_bell_;
    std::set<std::pair<uint64_t, uint64_t>> gone_;  // link and region: what clients were told and did not answer yet
};

using EnginePtr = std::unique_ptr<Engine>;

EnginePtr make_comm(const std::string &id);
EnginePtr make_cs(const std::string &id);
EnginePtr make_fab(const std::string &id);

}  // namespace sim
