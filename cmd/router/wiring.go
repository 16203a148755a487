package main

import (
	"fmt"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/penstock/penstock/admission"
	"github.com/penstock/penstock/config"
	"github.com/penstock/penstock/fleet"
	"github.com/penstock/penstock/proxy"
)

// ownFiles is what is kept free of the process's limit of open files, for
// listeners, scrapes and logs.
const ownFiles = 128

// connectionsFor bounds the client connections by the limit of open files:
// each may need another one to a replica, and a router without file descriptors
// can serve nobody.
func connectionsFor(configured int, files uint64) int {
	if files == 0 || uint64(configured) <= files/2 && uint64(2*configured)+ownFiles <= files {
		return configured
	}
	return max(16, int(min(files, 1<<30)-min(files, ownFiles))/2)
}

// loggers write to standard error. The access log is complete; of the rest,
// what repeats a thousand times a second is thinned, so that an error does not
// become the load: the first hundred of each kind in a second, then every
// hundredth. The level is of both and can be changed later.
type loggers struct {
	log, access *zap.Logger
	level       zap.AtomicLevel
}

func newLoggers(c config.Log) (l loggers, err error) {
	l.level, err = zap.ParseAtomicLevel(c.Level)
	if err != nil {
		return l, fmt.Errorf("log.level: %w", err)
	}
	zc := zap.NewProductionConfig()
	zc.Level = l.level
	zc.Encoding = c.Format
	zc.DisableCaller = true
	zc.DisableStacktrace = true
	zc.OutputPaths, zc.ErrorOutputPaths = []string{"stderr"}, []string{"stderr"}
	zc.EncoderConfig.TimeKey = "time"
	zc.EncoderConfig.EncodeTime = zapcore.RFC3339NanoTimeEncoder
	zc.EncoderConfig.EncodeDuration = zapcore.StringDurationEncoder
	if c.Format == "console" {
		zc.EncoderConfig.EncodeTime = zapcore.TimeEncoderOfLayout("15:04:05.000")
		zc.EncoderConfig.EncodeLevel = zapcore.CapitalLevelEncoder
	}
	zc.Sampling = nil
	l.access, err = zc.Build()
	if err != nil {
		return l, err
	}
	l.log = l.access.WithOptions(zap.WrapCore(func(c zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(c, time.Second, 100, 100)
	}))
	return l, nil
}

func objective(o config.Objective) admission.Objective {
	return admission.Objective{TTFT: o.TTFT.Seconds(), TTFTPer1k: o.TTFTPer1K.Seconds(), ITL: o.ITL.Seconds()}
}

// poolConfig is a pool's admission configuration.
func poolConfig(c *config.Config, p *config.Pool) admission.Config {
	ac := admission.Config{
		Objective: objective(p.Objective), Policy: p.Policy, Shadow: p.Shadow,
		Headroom: float64(p.Headroom.Share), HeadroomN1: p.Headroom.NMinus1,
		Cap: p.Concurrency, MaxHeld: c.Limits.HeldRequests, MaxHeldBytes: int(c.Limits.HeldBytes),
		HangAfter: c.Health.HangAfter.Seconds(),
	}
	for i := range c.Classes {
		k := &c.Classes[i]
		ac.Classes = append(ac.Classes, admission.Class{Name: k.Name, Wait: k.Wait.Seconds(), Deadline: k.Deadline.Seconds()})
		cl := &ac.Classes[i]
		if k.Objective != nil {
			cl.Objective = objective(*k.Objective)
		}
		if i > 0 {
			cl.MinShare = float64(k.MinShare)
		}
	}
	return ac
}

// proxyOptions are the data path's options, replicas apart.
func proxyOptions(c *config.Config, budgets map[string]*admission.AttemptBudget) proxy.Options {
	o := proxy.Options{
		TenantHeader: c.Tenants.Header,
		PassAuth:     c.Forward.ClientAuth, TrustForwarded: c.Forward.TrustClient, ShowReplica: c.Forward.ShowReplica,
		TolerateViolations: c.Integrity == "observe", StrictIntegrity: c.Integrity == "terminate",
		MaxBody: int(c.Limits.MaxBody), MaxHeader: int(c.Limits.MaxHeader), ReceiveBytes: int64(c.Limits.ReceiveBytes), MaxInFlight: c.Limits.MaxInFlight,
		MaxConnections: c.Limits.MaxConnections, BufferAnswer: int(c.Limits.BufferAnswer),
		HeaderTimeout: c.Timeouts.Header, BodyTimeout: c.Timeouts.Body, IdleTimeout: c.Timeouts.Idle, WriteTimeout: c.Timeouts.Write,
		ConnectTimeout: c.Timeouts.Connect, FirstToken: c.Timeouts.FirstToken, AnswerTimeout: c.Timeouts.Answer,
		StallTimeout: c.Timeouts.Stall, UpstreamIdle: c.Timeouts.UpstreamIdle, Attempts: c.Attempts.PerRequest,
	}
	o.Classes = classOptions(c)
	for i := range c.Pools {
		p := &c.Pools[i]
		po := poolOptions(p)
		po.Core, po.Budget = admission.New(poolConfig(c, p)), budgets[p.Name]
		o.Pools = append(o.Pools, po)
	}
	return o
}

func classOptions(c *config.Config) (out []proxy.ClassOptions) {
	for i := range c.Classes {
		cl := &c.Classes[i]
		out = append(out, proxy.ClassOptions{Name: cl.Name, Deadline: cl.Deadline, Exact: cl.Exact})
	}
	return out
}

// capsOf are a pool's abilities as bits; none given are all.
func capsOf(names []string) uint64 {
	if names == nil {
		return fleet.AbilityAll
	}
	bits := map[string]uint64{"tools": fleet.AbilityTools, "images": fleet.AbilityImages, "audio": fleet.AbilityAudio, "video": fleet.AbilityVideo}
	caps := fleet.AbilityText
	for _, n := range names {
		caps |= bits[n]
	}
	return caps
}

// poolOptions are what the data path has to know of a pool, core and budget
// apart.
func poolOptions(p *config.Pool) proxy.PoolOptions {
	po := proxy.PoolOptions{Name: p.Name, Models: p.Models, SideEffects: p.SideEffects,
		TTFTObjective: p.Objective.TTFT.Seconds(), TTFTPer1K: p.Objective.TTFTPer1K.Seconds(), ITLObjective: p.Objective.ITL.Seconds()}
	for _, a := range p.Aliases {
		po.Aliases = append(po.Aliases, a.Name)
		if a.Model != "" {
			if po.AliasOf == nil {
				po.AliasOf = map[string]string{}
			}
			po.AliasOf[a.Name] = a.Model
		}
	}
	return po
}

// labels gives the regions and failure domains of a configuration their
// numbers: a bit for each region, a number from 1 for each domain.
type labels struct {
	mu      sync.Mutex
	regions map[string]uint64
	domains map[string]uint32
}

// newLabels numbers what the configuration names, so that its regions have
// bits of their own whatever discovery brings.
func newLabels(c *config.Config) *labels {
	l := &labels{regions: map[string]uint64{}, domains: map[string]uint32{}}
	for i := range c.Routes {
		for _, r := range c.Routes[i].Regions {
			l.region(r)
		}
	}
	for i := range c.Pools {
		l.region(c.Pools[i].Labels["region"])
	}
	return l
}

// otherRegion is the bit that all regions beyond the 63rd share. No route can
// permit it, so they fail closed.
const otherRegion = 1 << 63

// region is the bit of a region; 0 for none.
func (l *labels) region(name string) uint64 {
	if name == "" {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.regions[name] == 0 {
		if len(l.regions) >= 63 {
			return otherRegion
		}
		l.regions[name] = 1 << len(l.regions)
	}
	return l.regions[name]
}

func (l *labels) domain(name string) uint32 {
	if name == "" {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.domains[name] == 0 {
		l.domains[name] = uint32(len(l.domains) + 1)
	}
	return l.domains[name]
}
